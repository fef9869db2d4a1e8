// The header is read as a stream of events, not into a tree: only three levels can occur, so a
// header of a million brackets ends at the fourth, and names that come twice are seen (a tree keeps
// the last).
#include "io/safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "io/file_error.hpp"

namespace abacist::io {
namespace {

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxRank = 32;
constexpr std::string_view kMetadata = "__metadata__";

struct Entry {
  std::string name;
  std::string type;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> offsets;
  bool has_type = false, has_shape = false, has_offsets = false;
};

/// Receives the JSON events; the return values say whether to go on.
class HeaderReader {
 public:
  using Json = nlohmann::json;

  std::vector<Entry> entries;
  std::string problem;

  bool start_object(std::size_t) {
    if (depth_ >= 2 || list_ != nullptr) return fail("nests deeper than the format allows");
    if (depth_ == 1 && metadata_) {
      if (std::exchange(metadata_seen_, true)) return fail("has two entries __metadata__");
    } else if (depth_ == 1) {
      entries.emplace_back().name = key_;
    }
    ++depth_;
    return true;
  }

  bool end_object() {
    if (depth_ == 2 && !metadata_) {
      const Entry& entry = entries.back();
      if (!entry.has_type || !entry.has_shape || !entry.has_offsets) {
        return fail("tensor '" + printable(entry.name) + "' lacks dtype, shape or data_offsets");
      }
    }
    --depth_;
    return true;
  }

  bool key(std::string& text) {
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      // C1 control characters are 0xc2 0x80 to 0xc2 0x9f in UTF-8; a terminal obeys some of them.
      const bool c1 =
          c == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0;
      if (c < 0x20 || c == 0x7f || c1) return fail("has a name with a control character");
    }
    if (depth_ == 1) {
      metadata_ = text == kMetadata;
      key_ = text;
      if (!metadata_ && !names_.insert(text).second) {
        return fail("has two tensors named '" + printable(text) + "'");
      }
      return true;
    }
    if (metadata_) return true;
    return field(text);
  }

  bool start_array(std::size_t) {
    if (depth_ != 2 || metadata_ || list_ != nullptr) return fail("has an array out of place");
    if (field_ == "shape") list_ = &entries.back().shape;
    if (field_ == "data_offsets") list_ = &entries.back().offsets;
    return list_ != nullptr || fail("has an array out of place");
  }

  bool end_array() {
    list_ = nullptr;
    return true;
  }

  bool string(std::string& text) {
    if (depth_ == 2 && metadata_) return true;
    if (depth_ != 2 || field_ != "dtype" || list_ != nullptr)
      return fail("has a string out of place");
    entries.back().type = text;
    return true;
  }

  bool number_unsigned(std::uint64_t value) {
    if (list_ == nullptr) return fail("has a number out of place");
    if (value > static_cast<std::uint64_t>(INT64_MAX)) return fail("has a number beyond 2^63");
    if (list_->size() == kMaxRank) return fail("has a tensor of more than 32 axes");
    list_->push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool number_integer(std::int64_t) { return fail("has a negative number"); }
  bool number_float(double, const std::string&) { return fail("has a number that is not whole"); }
  bool null() { return fail("has a null"); }
  bool boolean(bool) { return fail("has a boolean"); }
  bool binary(Json::binary_t&) { return fail("has binary data"); }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) {
    return fail("is not valid JSON (byte " + std::to_string(position) + ")");
  }

  bool fail(const std::string& what) {
    if (problem.empty()) problem = "its header " + what;
    return false;
  }

 private:
  bool field(const std::string& text) {
    Entry& entry = entries.back();
    field_ = text;
    bool* seen = text == "dtype"          ? &entry.has_type
                 : text == "shape"        ? &entry.has_shape
                 : text == "data_offsets" ? &entry.has_offsets
                                          : nullptr;
    if (seen == nullptr) return fail("has an unknown field '" + printable(text) + "'");
    if (std::exchange(*seen, true)) return fail("has a tensor with two fields '" + text + "'");
    return true;
  }

  int depth_ = 0;
  bool metadata_ = false;
  bool metadata_seen_ = false;
  std::string key_, field_;
  std::vector<std::int64_t>* list_ = nullptr;
  std::unordered_set<std::string> names_;
};

struct Type {
  std::string_view name;
  std::int64_t bits;
  std::optional<DType> dtype;
};

constexpr Type kTypes[] = {
    {"F32", 32, DType::f32}, {"F16", 16, DType::f16}, {"BF16", 16, DType::bf16},
    {"F64", 64, DType::f64}, {"I32", 32, DType::i32}, {"I64", 64, {}},
    {"U64", 64, {}},         {"U32", 32, {}},         {"I16", 16, {}},
    {"U16", 16, {}},         {"I8", 8, {}},           {"U8", 8, DType::u8},
    {"BOOL", 8, DType::u8},  {"F8_E4M3", 8, {}},      {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},      {"C64", 64, {}},         {"F4", 4, {}},
};

/// The tensor of an entry, its size checked against its offsets.
Array make_array(const Entry& entry, std::span<const std::byte> data, const std::string& path) {
  const std::string who = "tensor '" + printable(entry.name) + "' ";
  const auto* type = std::find_if(std::begin(kTypes), std::end(kTypes),
                                  [&](const Type& t) { return t.name == entry.type; });
  if (type == std::end(kTypes)) {
    throw FileError(path, who + "has the unknown dtype '" + printable(entry.type) + "'");
  }
  if (entry.offsets.size() != 2 || entry.offsets[0] > entry.offsets[1] ||
      static_cast<std::uint64_t>(entry.offsets[1]) > data.size()) {
    throw FileError(path, who + "has data_offsets " + shape_text(entry.offsets) +
                              ", must be [begin, end] within the " + std::to_string(data.size()) +
                              " bytes of data");
  }
  const auto count = element_count(entry.shape);
  std::int64_t bits = 0;
  if (!count || __builtin_mul_overflow(*count, type->bits, &bits)) {
    throw FileError(path, who + "has shape " + shape_text(entry.shape) + ", which overflows");
  }
  const std::int64_t bytes = entry.offsets[1] - entry.offsets[0];
  if (bits % 8 != 0 || bits / 8 != bytes) {
    throw FileError(path, who + "is " + entry.type + shape_text(entry.shape) + ", " +
                              std::to_string(bits / 8) + " bytes, but its data_offsets span " +
                              std::to_string(bytes));
  }
  Array array;
  array.name = entry.name;
  array.type_name = entry.type;
  array.dtype = type->dtype;
  array.shape = entry.shape;
  array.stride = dense_strides(entry.shape, false);
  array.data = data.data() + entry.offsets[0];
  return array;
}

std::vector<Entry> read_header(std::string_view text, const std::string& path) {
  HeaderReader reader;
  // The JSON reader takes NUL for the end of its input.
  if (text.find('\0') != text.npos) throw FileError(path, "its header has a NUL byte");
  if (!text.starts_with('{')) throw FileError(path, "its header does not start with '{'");
  const bool parsed = nlohmann::json::sax_parse(text.begin(), text.end(), &reader,
                                                nlohmann::json::input_format_t::json);
  if (!parsed) throw FileError(path, reader.problem);
  return std::move(reader.entries);
}

const char* type_name(DType dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return type.name.data();
  }
  return "F32";
}

}  // namespace

std::vector<Array> parse_safetensors(std::span<const std::byte> file, const std::string& path) {
  std::uint64_t length = 0;
  if (file.size() < sizeof length) throw FileError(path, "is too short for a .safetensors file");
  std::memcpy(&length, file.data(), sizeof length);  // little-endian, as the machines we build for
  if (length > kMaxHeader || length > file.size() - sizeof length) {
    throw FileError(path, "its header claims " + std::to_string(length) + " bytes, more than " +
                              (length > kMaxHeader ? "the format allows" : "the file has"));
  }
  const auto* text = reinterpret_cast<const char*>(file.data()) + sizeof length;
  std::vector<Entry> entries = read_header({text, length}, path);
  const auto data = file.subspan(sizeof length + length);

  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.offsets < b.offsets; });
  std::vector<Array> arrays;
  std::int64_t covered = 0;
  for (const Entry& entry : entries) {
    arrays.push_back(make_array(entry, data, path));
    if (entry.offsets[0] != covered) {
      throw FileError(path, "tensor '" + printable(entry.name) + "' starts at byte " +
                                std::to_string(entry.offsets[0]) + " of the data, must start at " +
                                std::to_string(covered) + " (no overlaps, no holes)");
    }
    covered = entry.offsets[1];
  }
  if (static_cast<std::uint64_t>(covered) != data.size()) {
    throw FileError(path, "has " + std::to_string(data.size()) +
                              " bytes of data, its tensors cover " + std::to_string(covered));
  }
  return arrays;
}

std::string safetensors_header(const std::vector<Array>& arrays) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::int64_t offset = 0;
  for (const Array& array : arrays) {
    const std::int64_t end =
        offset + element_count(array.shape).value() * size_of(array.dtype.value());
    header[array.name] = {{"dtype", type_name(*array.dtype)},
                          {"shape", array.shape},
                          {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // keeps the data aligned for whoever maps the file
  const std::uint64_t length = text.size();
  std::string prefix(sizeof length, '\0');
  std::memcpy(prefix.data(), &length, sizeof length);
  return prefix + text;
}

}  // namespace abacist::io
