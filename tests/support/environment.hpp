// What the environment asks of the tests, and forcing by environment variables.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace abacist::testing {

/// How much of a table runs: ABACIST_TEST_REDUCED=1 (sanitizers, emulators), nothing, or
/// ABACIST_TEST_FULL=1.
enum class Effort : std::uint8_t { reduced, standard, full };

Effort effort();

/// One of three figures by effort().
template <class T>
T by_effort(T reduced, T standard, T full) {
  switch (effort()) {
    case Effort::reduced:
      return reduced;
    case Effort::full:
      return full;
    case Effort::standard:
      break;
  }
  return standard;
}

/// Sets an environment variable and puts back what was there. Not for use while other threads run.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const std::string& value);
  ~ScopedEnvironment();
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  std::string name_;
  std::string before_;
  bool had_value_;
};

/// The instruction sets of cpu_targets(), best first.
std::vector<std::string> cpu_target_list();

/// Those that the tests run on: all, or the one that ABACIST_CPU_TARGET named when the process
/// began.
const std::vector<std::string>& tested_targets();

/// Calls body(name) with the CPU backend forced onto each of tested_targets() in turn.
template <class Body>
void for_each_target(const Body& body) {
  for (const std::string& target : tested_targets()) {
    const ScopedEnvironment force("ABACIST_CPU_TARGET", target);
    body(target);
  }
}

}  // namespace abacist::testing
