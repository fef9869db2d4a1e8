#include "io/tensor_file.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <string_view>
#include <system_error>

#include "io/file_error.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace abacist::io {
namespace {

std::string listed(const std::vector<LoadedArray>& all) {
  constexpr std::size_t kLimit = 8;
  std::string names;
  for (std::size_t i = 0; i < all.size() && i < kLimit; ++i) {
    names += (i > 0 ? ", " : "") + printable(all[i].array.name);
  }
  if (all.size() > kLimit) names += ", ... (" + std::to_string(all.size()) + " in all)";
  return names;
}

}  // namespace

Location Location::parse(const std::string& text) {
  constexpr std::string_view kSafetensors = ".safetensors";
  if (text.ends_with(".npy")) return {text, Format::npy, ""};
  if (text.ends_with(kSafetensors)) return {text, Format::safetensors, ""};
  const std::size_t at = text.find(std::string(kSafetensors) + ":");
  if (at != text.npos) {
    const std::size_t end = at + kSafetensors.size();
    return {text.substr(0, end), Format::safetensors, text.substr(end + 1)};
  }
  throw FileError(text, "must end in .npy or .safetensors, or .safetensors:NAME");
}

std::vector<LoadedArray> load_all(const Location& location) {
  const auto file = std::make_shared<const MappedFile>(location.path);
  if (location.format == Format::npy) return {{parse_npy(file->bytes(), location.path), file}};
  std::vector<LoadedArray> all;
  for (Array& array : parse_safetensors(file->bytes(), location.path)) {
    all.push_back({std::move(array), file});
  }
  return all;
}

LoadedArray load(const Location& location, const std::string& default_name) {
  std::vector<LoadedArray> all = load_all(location);
  if (location.format == Format::npy) return std::move(all.front());
  const std::string& wanted = location.name.empty() ? default_name : location.name;
  for (LoadedArray& loaded : all) {
    if (loaded.array.name == wanted) return std::move(loaded);
  }
  if (location.name.empty() && all.size() == 1) return std::move(all.front());
  throw FileError(location.path, "has no tensor '" + printable(wanted) + "'; it has " +
                                     (all.empty() ? "none" : listed(all)));
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat x {
  }, y{};
  if (stat(a.c_str(), &x) == 0 && stat(b.c_str(), &y) == 0) {
    return x.st_dev == y.st_dev && x.st_ino == y.st_ino;
  }
  const auto place = [](const std::string& path) {
    std::error_code ignored;
    return std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
  };
  return !place(a).empty() && place(a) == place(b);
}

}  // namespace abacist::io
