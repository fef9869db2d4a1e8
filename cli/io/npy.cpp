// The header of a .npy file is the text of a Python dictionary with exactly three entries:
//
//     {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//
// It is read by a parser for just that, never by evaluating it.
#include "io/npy.hpp"

#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "io/file_error.hpp"

namespace abacist::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kMaxHeader = 65536;  // NumPy writes about a hundred bytes
constexpr std::size_t kMaxRank = 32;       // NumPy's own limit of old

struct Header {
  std::string descr;
  bool fortran_order = false;
  std::vector<std::int64_t> shape;
};

class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : rest_(text), path_(path) {}

  Header parse() {
    Header header;
    bool seen[3] = {};
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      const std::size_t index = key == "descr" ? 0 : key == "fortran_order" ? 1 : 2;
      if (index == 2 && key != "shape") fail("its header has an unknown entry '" + key + "'");
      if (seen[index]) fail("its header has two entries '" + key + "'");
      seen[index] = true;
      if (index == 0) header.descr = descr();
      if (index == 1) header.fortran_order = boolean();
      if (index == 2) header.shape = tuple();
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    skip_blanks();
    if (!rest_.empty()) fail("its header goes on after its dictionary");
    for (const bool present : seen) {
      if (!present) fail("its header lacks descr, fortran_order or shape");
    }
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const { throw FileError(path_, problem); }

  void skip_blanks() {
    while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\n')) rest_.remove_prefix(1);
  }

  bool accept(char c) {
    skip_blanks();
    if (rest_.empty() || rest_[0] != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(std::string("its header is malformed: no '") + c + "' where one must be");
  }

  std::string quoted() {
    skip_blanks();
    const char quote = rest_.empty() ? '\0' : rest_[0];
    const std::size_t end = quote == '\'' || quote == '"' ? rest_.find(quote, 1) : rest_.npos;
    if (end == rest_.npos) fail("its header is malformed: no string where one must be");
    const std::string text = printable(std::string(rest_.substr(1, end - 1)));
    rest_.remove_prefix(end + 1);
    return text;
  }

  std::string descr() {
    skip_blanks();
    if (!rest_.empty() && rest_[0] == '[') fail("holds a structured array, must be plain numbers");
    return quoted();
  }

  bool boolean() {
    skip_blanks();
    for (const auto& [word, value] :
         {std::pair{std::string_view("True"), true}, std::pair{std::string_view("False"), false}}) {
      if (!rest_.starts_with(word)) continue;
      rest_.remove_prefix(word.size());
      return value;
    }
    fail("its header is malformed: fortran_order must be True or False");
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> values;
    expect('(');
    while (!accept(')')) {
      skip_blanks();
      std::int64_t value = 0;
      const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
      if (error != std::errc{} || value < 0) {
        fail("its header is malformed: shape must hold whole numbers from 0 to 2^63 - 1");
      }
      rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
      if (values.size() == kMaxRank) fail("has more than 32 axes");
      values.push_back(value);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  std::string_view rest_;
  const std::string& path_;
};

struct Type {
  std::string_view descr;
  std::int64_t bytes;
  std::optional<DType> dtype;
};

constexpr Type kTypes[] = {{"<f2", 2, DType::f16}, {"<f4", 4, DType::f32}, {"<f8", 8, DType::f64},
                           {"<i4", 4, DType::i32}, {"|u1", 1, DType::u8},  {"|b1", 1, DType::u8},
                           {"<i8", 8, {}}};

const Type& checked_type(const std::string& descr, const std::string& path) {
  for (const Type& type : kTypes) {
    if (type.descr == descr) return type;
  }
  if (descr.starts_with('>')) {
    throw FileError(path, "is big-endian (" + descr + "), must be little-endian; in NumPy: " +
                              "a.astype(a.dtype.newbyteorder('<'))");
  }
  if (descr.find('O') != descr.npos) {
    throw FileError(path, "holds Python objects (" + descr + "), must be plain numbers");
  }
  if (descr == "<V2" || descr == "|V2") {
    throw FileError(path, "holds " + descr + ", maybe bf16, for which .npy has no type; " +
                              "store bf16 as .safetensors");
  }
  throw FileError(path, "holds elements of type " + descr +
                            ", must be <f2, <f4 or <f8 (or <i4, <i8, |u1, |b1)");
}

struct Extent {
  std::size_t begin = 0;
  std::size_t size = 0;
};

/// Where the header's text lies.
Extent locate_header(std::span<const std::byte> file, const std::string& path) {
  if (file.size() < 10) throw FileError(path, "is too short for a .npy file");
  if (std::memcmp(file.data(), kMagic.data(), kMagic.size()) != 0) {
    throw FileError(path, "is not a .npy file (it does not start with \\x93NUMPY)");
  }
  const auto byte = [&](std::size_t i) { return std::to_integer<std::size_t>(file[i]); };
  const std::size_t version = byte(6);
  if (version < 1 || version > 3) {
    throw FileError(path, "is of .npy version " + std::to_string(version) + ", must be 1 to 3");
  }
  Extent header{10, byte(8) | byte(9) << 8};
  if (version > 1) {
    if (file.size() < 12) throw FileError(path, "is too short for a .npy file");
    header = {12, header.size | byte(10) << 16 | byte(11) << 24};
  }
  if (header.size > kMaxHeader || header.size > file.size() - header.begin) {
    throw FileError(path, "its header claims " + std::to_string(header.size) +
                              " bytes, more than " +
                              (header.size > kMaxHeader ? "any real one has" : "the file has"));
  }
  return header;
}

}  // namespace

Array parse_npy(std::span<const std::byte> file, const std::string& path) {
  const Extent at = locate_header(file, path);
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + at.begin, at.size);
  const Header header = HeaderParser(text, path).parse();
  Array array;
  array.type_name = header.descr;
  const Type& type = checked_type(header.descr, path);
  array.dtype = type.dtype;
  array.shape = header.shape;
  const auto count = element_count(header.shape);
  std::int64_t bytes = 0;
  if (!count || __builtin_mul_overflow(*count, type.bytes, &bytes)) {
    throw FileError(path, "its shape " + shape_text(header.shape) + " overflows 64 bits");
  }
  const std::size_t present = file.size() - at.begin - at.size;
  if (static_cast<std::size_t>(bytes) != present) {
    const bool less = present < static_cast<std::size_t>(bytes);
    throw FileError(path, std::string(less ? "is cut short: " : "goes on after its array: ") +
                              shape_text(header.shape) + " of " + header.descr + " is " +
                              std::to_string(bytes) + " bytes, the file has " +
                              std::to_string(present));
  }
  array.stride = dense_strides(header.shape, header.fortran_order);
  array.data = file.data() + at.begin + at.size;
  return array;
}

bool npy_can_hold(DType dtype) { return dtype != DType::bf16; }

std::string npy_header(DType dtype, const std::vector<std::int64_t>& shape) {
  const char* descr = dtype == DType::f16   ? "<f2"
                      : dtype == DType::f64 ? "<f8"
                      : dtype == DType::i32 ? "<i4"
                                            : "<f4";
  std::string text = std::string("{'descr': '") + descr + "', 'fortran_order': False, 'shape': (";
  for (const std::int64_t extent : shape) text += std::to_string(extent) + ",";
  text += "), }";
  constexpr std::size_t kPrefix = 10;
  constexpr std::size_t kAlignment = 64;  // as NumPy aligns its data
  const std::size_t used = kPrefix + text.size() + 1;
  text.append((kAlignment - used % kAlignment) % kAlignment, ' ');
  text += '\n';
  std::string header(kMagic);
  header +=
      {'\x01', '\x00', static_cast<char>(text.size() & 0xff), static_cast<char>(text.size() >> 8)};
  return header + text;
}

}  // namespace abacist::io
