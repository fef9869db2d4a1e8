#include "support/environment.hpp"

#include <cstdlib>
#include <cstring>

#include "abacist/version.hpp"
#include "support/random.hpp"

namespace abacist::testing {
namespace {

bool is_on(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace

std::uint64_t base_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("ABACIST_TEST_SEED");
    return text != nullptr && *text != '\0' ? std::strtoull(text, nullptr, 0) : 20'220'527u;
  }();
  return seed;
}

Effort effort() {
  if (is_on("ABACIST_TEST_REDUCED")) return Effort::reduced;
  return is_on("ABACIST_TEST_FULL") ? Effort::full : Effort::standard;
}

ScopedEnvironment::ScopedEnvironment(const char* name, const std::string& value) : name_(name) {
  const char* before = std::getenv(name);
  had_value_ = before != nullptr;
  if (had_value_) before_ = before;
  setenv(name, value.c_str(), 1);
}

ScopedEnvironment::~ScopedEnvironment() {
  if (had_value_) {
    setenv(name_.c_str(), before_.c_str(), 1);
  } else {
    unsetenv(name_.c_str());
  }
}

std::vector<std::string> cpu_target_list() {
  std::vector<std::string> targets;
  std::string rest = cpu_targets();
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    targets.push_back(rest.substr(0, comma));
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return targets;
}

const std::vector<std::string>& tested_targets() {
  static const std::vector<std::string> targets = [] {
    const char* named = std::getenv("ABACIST_CPU_TARGET");
    return named != nullptr && *named != '\0' ? std::vector<std::string>{named} : cpu_target_list();
  }();
  return targets;
}

}  // namespace abacist::testing
