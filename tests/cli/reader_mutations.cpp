// Feeds damaged files to the readers of .npy and .safetensors, many thousand a second: each is read
// or refused with a FileError, and what is read lies inside the file. Under the sanitizers this
// finds what the black-box tests cannot see.
//
//     reader_mutations [ROUNDS [SEED]]
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "io/file_error.hpp"
#include "io/npy.hpp"
#include "io/safetensors.hpp"

namespace {

using abacist::DType;
using abacist::io::Array;

std::string whole_npy(DType dtype, const std::vector<std::int64_t>& shape) {
  const auto bytes = abacist::io::element_count(shape).value() * abacist::size_of(dtype);
  return abacist::io::npy_header(dtype, shape) + std::string(static_cast<std::size_t>(bytes), 'x');
}

std::string whole_safetensors() {
  std::vector<Array> arrays(3);
  std::int64_t bytes = 0;
  const std::array<const char*, 3> names = {"q", "k", "v"};
  const std::array<DType, 3> types = {DType::f32, DType::bf16, DType::f64};
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    arrays[i].name = names[i];
    arrays[i].dtype = types[i];
    arrays[i].shape = {2, 3, static_cast<std::int64_t>(i)};
    bytes += abacist::io::element_count(arrays[i].shape).value() * abacist::size_of(types[i]);
  }
  return abacist::io::safetensors_header(arrays) +
         std::string(static_cast<std::size_t>(bytes), 'x');
}

/// Pieces that broke other readers.
constexpr std::array kPieces = {"{",
                                "}",
                                "[",
                                "]",
                                "\"",
                                "'",
                                ":",
                                ",",
                                "(",
                                ")",
                                "-1",
                                "1e400",
                                "0",
                                "99999999999999999999",
                                "9223372036854775807",
                                "\\u0000",
                                "[[",
                                "null",
                                "true",
                                "'shape'",
                                "'<f8'",
                                "\"shape\"",
                                "\"data_offsets\":[0,0]",
                                "\xff",
                                " ",
                                "\n",
                                "\"__metadata__\":{}"};

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : bits_(seed) {}

  void mutate(std::string& file) {
    for (std::size_t edits = 1 + below(6); edits-- > 0;) edit(file);
  }

 private:
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(bits_() % limit); }

  void edit(std::string& file) {
    const std::size_t at = below(file.size() + 1);
    const std::size_t rest = file.size() - at;
    switch (below(6)) {
      case 0:
        if (rest > 0) file[at] = static_cast<char>(bits_());
        break;
      case 1:
        file.erase(at, 1 + below(20));
        break;
      case 2:
        file.insert(at, kPieces[below(kPieces.size())]);
        break;
      case 3:
        file.insert(at, file.substr(below(file.size() + 1), below(40)));
        break;
      case 4: {  // a length or an offset near a limit
        const std::uint64_t value = (std::uint64_t{1} << below(64)) - below(3);
        if (rest >= sizeof value) std::memcpy(file.data() + at, &value, sizeof value);
        break;
      }
      default:
        if (rest > 0) file[at] = static_cast<char>(file[at] ^ (1 << below(8)));
    }
  }

  std::mt19937_64 bits_;
};

/// Every element that the strides reach lies inside the file.
bool inside(const Array& array, std::span<const std::byte> file) {
  if (!array.dtype) return true;
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < array.shape.size(); ++axis) {
    if (array.shape[axis] == 0) return true;
    last += (array.shape[axis] - 1) * array.stride[axis];
  }
  const std::int64_t end = array.data - file.data() + (last + 1) * abacist::size_of(*array.dtype);
  return array.data >= file.data() && end <= static_cast<std::int64_t>(file.size());
}

/// Reads a file from memory of exactly its size, so that a byte too far is seen. True if all is
/// well.
bool read(const std::string& text, bool npy, std::int64_t& good) {
  const auto copy = std::make_unique<std::byte[]>(text.size());
  std::memcpy(copy.get(), text.data(), text.size());
  const std::span<const std::byte> file(copy.get(), text.size());
  try {
    const auto arrays = npy ? std::vector<Array>{abacist::io::parse_npy(file, "file")}
                            : abacist::io::parse_safetensors(file, "file");
    ++good;
    return std::all_of(arrays.begin(), arrays.end(),
                       [&](const Array& array) { return inside(array, file); });
  } catch (const abacist::io::FileError& error) {
    const std::string what = error.what();
    const bool one_line = std::none_of(what.begin(), what.end(), [](char c) {
      return static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e;
    });
    return one_line && what.size() < 2000;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 40000;
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 0) : 1;
  const std::array seeds = {whole_npy(DType::f32, {2, 3}), whole_npy(DType::f16, {}),
                            whole_npy(DType::f64, {4, 0, 2}), whole_safetensors()};
  Mutator mutator(seed);
  std::int64_t good = 0;
  for (std::int64_t round = 0; round < rounds; ++round) {
    const std::size_t which = static_cast<std::size_t>(round) % seeds.size();
    std::string file = seeds[which];
    if (round >= static_cast<std::int64_t>(seeds.size())) mutator.mutate(file);
    if (!read(file, which != 3, good)) {
      std::printf("round %lld of seed %llu is read wrongly\n", static_cast<long long>(round),
                  static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("%lld damaged files, %lld of them still readable\n", static_cast<long long>(rounds),
              static_cast<long long>(good));
  return good >= static_cast<std::int64_t>(seeds.size()) ? 0 : 1;
}
