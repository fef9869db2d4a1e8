#include "features.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "core/numeric.hpp"
#include "io/tensor_file.hpp"
#include "memory.hpp"
#include "random.hpp"
#include "user_error.hpp"

namespace abacist::cli {
namespace {

// Streams of random numbers; Q, K, V and the gradients have 1 to 5.
enum Stream : std::uint64_t { kSinks = 6, kBias, kVisible, kLengths, kPages };

/// The standard slopes: powers of 2^(-8/n) for n heads, n a power of two; else those of the next
/// smaller power of two, then every other one of the next larger (Press et al. 2022, appendix).
std::vector<double> standard_slopes(std::int64_t heads) {
  std::vector<double> slopes;
  const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(heads)));
  for (std::int64_t head = 0; head < heads; ++head) {
    const double exponent =
        head < power ? 8.0 * static_cast<double>(head + 1) / static_cast<double>(power)
                     : 8.0 * (static_cast<double>(head - power) + 0.5) / static_cast<double>(power);
    slopes.push_back(std::exp2(-exponent));
  }
  return slopes;
}

/// An option that names a file, and what the file must hold.
struct Wanted {
  const char* option;
  const char* name;  ///< in a .safetensors file
  std::size_t least_rank, most_rank;
  const char* what;
};

/// A file's array with four axes; those that it lacks come first and have extent 1, stride 0.
Operand load_padded(const std::string& text, const Wanted& wanted, auto&& serves) {
  const io::Location location = io::Location::parse(text);
  const io::LoadedArray loaded = io::load(location, wanted.name);
  const io::Array& array = loaded.array;
  const std::size_t rank = array.shape.size();
  if (rank < wanted.least_rank || rank > wanted.most_rank || !serves(array)) {
    throw UserError(fmt::format("{} ({}) is {}{}, must be {}", location.path, wanted.option,
                                array.type_name, io::shape_text(array.shape), wanted.what));
  }
  Operand operand;
  operand.spec = contiguous(*array.dtype, {1, 1, 1, 1});
  operand.spec.stride = {};
  for (std::size_t axis = 0; axis < rank; ++axis) {
    operand.spec.shape[kMaxRank - rank + axis] = array.shape[axis];
    operand.spec.stride[kMaxRank - rank + axis] = array.stride[axis];
  }
  std::tie(operand.data, operand.owner) = aligned_bytes(loaded, operand.spec);
  return operand;
}

/// Numbers [last axis] or [last but one, last axis], contiguous.
Operand load_numbers(const std::string& text, const Wanted& wanted, DType dtype) {
  const Operand padded = load_padded(text, wanted, is_float);
  Operand numbers = convert(padded.in(), dtype);
  const Extents& n = padded.spec.shape;
  numbers.spec =
      padded.spec.stride[2] == 0 ? contiguous(dtype, {n[3]}) : contiguous(dtype, {n[2], n[3]});
  return numbers;
}

std::int64_t integer_at(const Operand& operand, std::int64_t offset) {
  return static_cast<const std::int32_t*>(operand.data)[offset];
}

void set_integer(const Operand& operand, std::int64_t offset, std::int64_t value) {
  static_cast<std::int32_t*>(operand.data)[offset] = static_cast<std::int32_t>(value);
}

std::int32_t as_int32(std::int64_t value, const std::string& who) {
  if (value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    throw UserError(fmt::format("{} has {}, which is no 32-bit integer", who, value));
  }
  return static_cast<std::int32_t>(value);
}

/// 32-bit or 64-bit integers of a file as i32, contiguous.
Operand load_integers(const std::string& text, const Wanted& wanted) {
  const io::Location location = io::Location::parse(text);
  const io::LoadedArray loaded = io::load(location, wanted.name);
  const io::Array& array = loaded.array;
  const bool wide = array.type_name == "<i8" || array.type_name == "I64";
  const std::string who = fmt::format("{} ({})", location.path, wanted.option);
  if ((!wide && array.dtype != DType::i32) || array.shape.size() != wanted.least_rank) {
    throw UserError(fmt::format("{} is {}{}, must be {}", who, array.type_name,
                                io::shape_text(array.shape), wanted.what));
  }
  const bool matrix = array.shape.size() == 2;
  const std::int64_t rows = matrix ? array.shape[0] : 1;
  const std::int64_t columns = array.shape.back();
  Operand integers =
      matrix ? make_operand(DType::i32, {rows, columns}) : make_operand(DType::i32, {columns});
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int64_t at =
        (matrix ? i / columns * array.stride[0] : 0) + i % columns * array.stride.back();
    std::int64_t value = 0;
    if (wide) {
      std::memcpy(&value, array.data + at * std::int64_t{sizeof value}, sizeof value);
    } else {
      std::int32_t narrow = 0;
      std::memcpy(&narrow, array.data + at * std::int64_t{sizeof narrow}, sizeof narrow);
      value = narrow;
    }
    set_integer(integers, i, as_int32(value, who));
  }
  return integers;
}

/// "5,7,0" as i32[3].
Operand parse_lengths(const std::string& text, const char* option) {
  std::vector<std::int64_t> values;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    std::int64_t value = 0;
    const char* const last = text.data() + end;
    const auto [stop, error] = std::from_chars(text.data() + at, last, value);
    if (error != std::errc{} || stop != last) {
      throw UserError(
          fmt::format("{} is \"{}\", must be whole numbers N,N,..., or a file{}", option, text,
                      std::string_view(option) == "--key-lengths" ? ", or random" : ""));
    }
    values.push_back(as_int32(value, option));
    at = end + 1;
  }
  Operand lengths = make_operand(DType::i32, {static_cast<std::int64_t>(values.size())});
  for (std::size_t n = 0; n < values.size(); ++n) {
    set_integer(lengths, static_cast<std::int64_t>(n), values[n]);
  }
  return lengths;
}

/// `[b|1, h_q|1, s_q|1, s_k]` of "random[:AXES]", in which the axes b, h and q are not 1 where they
/// are named.
std::vector<std::int64_t> random_shape(const std::string& text, const char* option,
                                       const Inputs& inputs) {
  const std::string_view axes =
      text == "random" ? std::string_view("q")
                       : std::string_view(text).substr(std::string_view("random:").size());
  if (axes.find_first_not_of("bhq") != axes.npos) {
    throw UserError(fmt::format(
        "{} is \"{}\", must be random:AXES with AXES of b, h and q (those that are not 1)", option,
        text));
  }
  const Extents& q = inputs.q.spec.shape;
  const auto extent = [&](char axis, std::int64_t whole) {
    return axes.find(axis) == axes.npos ? 1 : whole;
  };
  return {extent('b', inputs.sequences()), extent('h', q[2]), extent('q', most_queries(inputs)),
          most_keys(inputs)};
}

bool is_random(const std::string& text) { return text == "random" || text.starts_with("random:"); }

/// All heads of key j of sequence n, into a row of a page, or the other way round.
void copy_key(const Operand& from, std::int64_t n, std::int64_t j, const Operand& to,
              std::int64_t page, std::int64_t row) {
  const std::int64_t size = size_of(from.spec.dtype);
  const auto at = [size](const Operand& x, std::int64_t outer, std::int64_t inner, std::int64_t h) {
    return (outer * x.spec.stride[0] + inner * x.spec.stride[1] + h * x.spec.stride[2]) * size;
  };
  const std::int64_t d = from.spec.shape[3];
  const std::int64_t step = from.spec.stride[3];  // the target is contiguous
  for (std::int64_t h = 0; h < from.spec.shape[2]; ++h) {
    const auto* const source = static_cast<const std::byte*>(from.data) + at(from, n, j, h);
    auto* const target = static_cast<std::byte*>(to.data) + at(to, page, row, h);
    if (step == 1) {
      std::memcpy(target, source, static_cast<std::size_t>(d * size));
      continue;
    }
    for (std::int64_t e = 0; e < d; ++e) {
      std::memcpy(target + e * size, source + e * step * size, static_cast<std::size_t>(size));
    }
  }
}

class Features {
 public:
  Features(Inputs& inputs, const ScoreArguments& score, std::uint64_t seed, bool data)
      : x_(inputs), a_(score), seed_(seed), data_(data), float_(inputs.q.spec.dtype) {
    if (float_ != DType::f64) float_ = DType::f32;
  }

  void add() {
    cu_seqlens();
    slopes();
    if (a_.sinks == "random") {
      x_.sinks = random_operand(float_, {x_.q.spec.shape[2]}, kSinks);
    } else if (!a_.sinks.empty()) {
      x_.sinks = load_numbers(note(a_.sinks),
                              {"--sinks", "sinks", 1, 1, "floats [h_q], or \"random\""}, float_);
    }
    pages();
    key_lengths();
    if (is_random(a_.bias)) {
      const auto n = random_shape(a_.bias, "--bias", x_);
      x_.bias = random_operand(x_.q.spec.dtype, {n[0], n[1], n[2], n[3]}, kBias);
    } else if (!a_.bias.empty()) {
      x_.bias = load_padded(note(a_.bias),
                            {"--bias", "bias", 1, 4, "floats [b|1, h_q|1, s_q|1, s_k]"}, is_float);
      if (x_.bias.spec.dtype != x_.q.spec.dtype) x_.bias = convert(x_.bias.in(), float_);
    }
    visible();
  }

 private:
  /// A file that must not be overwritten.
  const std::string& note(const std::string& text) {
    x_.paths.push_back(io::Location::parse(text).path);
    return text;
  }

  Operand empty_operand(DType dtype, std::initializer_list<std::int64_t> shape) const {
    if (data_) return make_operand(dtype, shape);
    Operand spec_alone;
    spec_alone.spec = contiguous(dtype, shape);
    return spec_alone;
  }
  Operand random_operand(DType dtype, std::initializer_list<std::int64_t> shape,
                         std::uint64_t stream) const {
    Operand operand = empty_operand(dtype, shape);
    if (data_) fill_normal(operand.data, dtype, operand.count(), seed_, stream);
    return operand;
  }

  /// "N,N,...", or a file.
  Operand integers_of(const std::string& text, const Wanted& wanted) {
    const bool file = text.ends_with(".npy") || text.find(".safetensors") != std::string::npos;
    return file ? load_integers(note(text), wanted) : parse_lengths(text, wanted.option);
  }

  void cu_seqlens() {
    if (!a_.varlen()) return;
    if (x_.q.spec.shape[0] != 1) {
      throw UserError("--cu-seqlens-q is for sequences behind one another, Q of rank 3");
    }
    if (a_.cu_seqlens_q.empty()) throw UserError("--cu-seqlens-k needs --cu-seqlens-q");
    x_.cu_seqlens_q = integers_of(
        a_.cu_seqlens_q, {"--cu-seqlens-q", "cu_seqlens_q", 1, 1, "whole numbers [b + 1]"});
    if (!a_.cu_seqlens_k.empty()) {
      x_.cu_seqlens_k = integers_of(
          a_.cu_seqlens_k, {"--cu-seqlens-k", "cu_seqlens_k", 1, 1, "whole numbers [b + 1]"});
    }
    for (const Operand* cu : {&x_.cu_seqlens_q, &x_.cu_seqlens_k}) {
      if (cu->spec.present() && cu->count() == 0) {
        throw UserError("cu_seqlens are empty, must have b + 1 entries, the first of them 0");
      }
    }
    if (!a_.paged() && (x_.k.spec.shape[0] != 1 || x_.v.spec.shape[0] != 1)) {
      throw UserError("--cu-seqlens-k is for sequences behind one another, K and V of rank 3");
    }
  }

  void slopes() {
    if (a_.alibi.empty()) return;
    if (a_.alibi != "auto") {
      x_.slopes =
          load_numbers(note(a_.alibi),
                       {"--alibi", "alibi_slopes", 1, 2, "floats [h_q] or [b, h_q]"}, DType::f32);
      return;
    }
    const std::int64_t heads = x_.q.spec.shape[2];
    x_.slopes = empty_operand(DType::f32, {heads});
    std::int64_t next = 0;
    for (const double slope : data_ ? standard_slopes(heads) : std::vector<double>{}) {
      core::store_element(x_.slopes.data, DType::f32, next++, slope);
    }
  }

  void key_lengths() {
    const std::int64_t b = x_.sequences();
    const std::int64_t s_k = most_keys(x_);
    if (a_.key_lengths == "random" || (a_.key_lengths.empty() && a_.page_size > 0)) {
      RandomBits bits(seed_, kLengths);
      x_.key_lengths = empty_operand(DType::i32, {b});
      for (std::int64_t n = 0; data_ && n < b; ++n) {
        const auto any = static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(keys_ + 1));
        set_integer(x_.key_lengths, n, a_.key_lengths.empty() ? keys_ : any);
      }
    } else if (!a_.key_lengths.empty()) {
      x_.key_lengths =
          integers_of(a_.key_lengths, {"--key-lengths", "key_lengths", 1, 1, "whole numbers [b]"});
    }
    if (a_.page_size > 0 && s_k > 0 && data_) lose_unused_rows();
  }

  void visible() {
    if (is_random(a_.visible)) {
      const auto n = random_shape(a_.visible, "--visible", x_);
      x_.visible = empty_operand(DType::u8, {n[0], n[1], n[2], n[3]});
      RandomBits bits(seed_, kVisible);
      auto* const bytes = static_cast<std::uint8_t*>(x_.visible.data);
      for (std::int64_t i = 0; data_ && i < x_.visible.count(); ++i) {
        bytes[i] = static_cast<std::uint8_t>(bits() >> 63);
      }
    } else if (!a_.visible.empty()) {
      x_.visible =
          load_padded(note(a_.visible),
                      {"--visible", "visible", 1, 4, "booleans or u8 [b|1, h_q|1, s_q|1, s_k]"},
                      [](const io::Array& array) { return array.dtype == DType::u8; });
    }
  }

  void pages() {
    keys_ = x_.k.spec.shape[1];
    if (!a_.block_table.empty() && a_.page_size > 0) {
      throw UserError("--page-size makes pages, --block-table has them: give one or the other");
    }
    if (!a_.block_table.empty()) {
      if (a_.key_lengths.empty()) throw UserError("--block-table needs --key-lengths");
      x_.block_table = load_integers(note(a_.block_table), {"--block-table", "block_table", 2, 2,
                                                            "whole numbers [b, max_pages]"});
      keys_ = most_keys(x_);
    }
    if (a_.page_size > 0) make_pages();
  }

  /// K and V as they are, moved into pages in random order.
  void make_pages() {
    const std::int64_t size = a_.page_size;
    const Extents k = x_.k.spec.shape;
    const std::int64_t per_sequence = (k[1] + size - 1) / size;
    const std::int64_t pages = k[0] * per_sequence;
    if (pages > std::numeric_limits<std::int32_t>::max()) {
      throw UserError(fmt::format("--page-size {} makes more than 2^31 pages", size));
    }
    const Operand from_k = x_.k;
    const Operand from_v = x_.v;
    x_.block_table = empty_operand(DType::i32, {k[0], per_sequence});
    x_.k = empty_operand(from_k.spec.dtype, {pages, size, k[2], k[3]});
    x_.v = empty_operand(from_v.spec.dtype, {pages, size, k[2], from_v.spec.shape[3]});
    if (!data_) return;
    std::vector<std::int64_t> ids(static_cast<std::size_t>(pages));
    std::iota(ids.begin(), ids.end(), std::int64_t{0});
    RandomBits bits(seed_, kPages);
    for (std::size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[bits() % i]);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      set_integer(x_.block_table, static_cast<std::int64_t>(i), ids[i]);
    }
    for (const auto& [to, from] : {std::pair{&x_.k, &from_k}, {&x_.v, &from_v}}) {
      // Every bit set is NaN in each type.
      std::memset(to->data, 0xff, static_cast<std::size_t>(to->bytes()));
      for (std::int64_t n = 0; n < k[0]; ++n) {
        for (std::int64_t j = 0; j < k[1]; ++j) {
          copy_key(*from, n, j, *to, integer_at(x_.block_table, n * per_sequence + j / size),
                   j % size);
        }
      }
    }
  }

  /// Rows past a sequence's length must not matter: NaN, too.
  void lose_unused_rows() {
    const std::int64_t size = a_.page_size;
    const std::int64_t entries = x_.block_table.spec.shape[1];
    // Wrong lengths are left to the library, which says what is wrong with them.
    for (std::int64_t n = 0; n < std::min(x_.key_lengths.count(), x_.block_table.spec.shape[0]);
         ++n) {
      const std::int64_t length = std::max<std::int64_t>(integer_at(x_.key_lengths, n), 0);
      if (length > keys_) {
        throw UserError(fmt::format("--key-lengths has {}, but K has {} keys", length, keys_));
      }
      for (std::int64_t j = length; j < entries * size; ++j) {
        const std::int64_t page = integer_at(x_.block_table, n * entries + j / size);
        for (const Operand* pool : {&x_.k, &x_.v}) {
          const std::int64_t row_bytes = pool->spec.stride[1] * size_of(pool->spec.dtype);
          auto* const rows = static_cast<std::byte*>(pool->data);
          std::memset(rows + (page * size + j % size) * row_bytes, 0xff,
                      static_cast<std::size_t>(row_bytes));
        }
      }
    }
  }

  Inputs& x_;
  const ScoreArguments& a_;
  std::uint64_t seed_;
  bool data_;
  DType float_;            ///< of what is neither Q, K nor V
  std::int64_t keys_ = 0;  ///< that a sequence may have at most
};

}  // namespace

namespace {

/// Of the sequences between these entries; wrong entries are left to the library.
std::int64_t longest(const Operand& cu_seqlens) {
  std::int64_t most = 0;
  for (std::int64_t n = 1; n < cu_seqlens.count(); ++n) {
    most = std::max(most, integer_at(cu_seqlens, n) - integer_at(cu_seqlens, n - 1));
  }
  return most;
}

}  // namespace

std::int64_t most_queries(const Inputs& inputs) {
  return inputs.cu_seqlens_q.spec.present() ? longest(inputs.cu_seqlens_q) : inputs.q.spec.shape[1];
}

std::int64_t most_keys(const Inputs& inputs) {
  const std::int64_t rows = inputs.k.spec.shape[1];
  if (inputs.cu_seqlens_k.spec.present()) return longest(inputs.cu_seqlens_k);
  if (!inputs.block_table.spec.present()) return rows;
  std::int64_t keys = 0;
  if (__builtin_mul_overflow(rows, inputs.block_table.spec.shape[1], &keys)) {
    throw UserError("--block-table has room for more than 2^63 keys");
  }
  return keys;
}

void add_features(Inputs& inputs, const ScoreArguments& score, std::uint64_t seed, bool data) {
  Features(inputs, score, seed, data).add();
}

Options options_for(const ScoreArguments& score, const Inputs& inputs) {
  Options options = score.options();
  if (inputs.varlen()) options.max_lengths = {most_queries(inputs), most_keys(inputs)};
  return options;
}

Inputs without_pages(const Inputs& inputs) {
  if (!inputs.block_table.spec.present()) return inputs;
  Inputs dense = inputs;
  dense.block_table = {};
  const std::int64_t b = inputs.q.spec.shape[0];
  const std::int64_t s_k = most_keys(inputs);
  const std::int64_t size = inputs.k.spec.shape[1];
  const std::int64_t entries = inputs.block_table.spec.shape[1];
  for (const auto& [to, from] : {std::pair{&dense.k, &inputs.k}, {&dense.v, &inputs.v}}) {
    *to = make_operand(from->spec.dtype, {b, s_k, from->spec.shape[2], from->spec.shape[3]});
    std::memset(to->data, 0, static_cast<std::size_t>(to->bytes()));
    for (std::int64_t n = 0; n < b; ++n) {
      const std::int64_t length = integer_at(inputs.key_lengths, n);
      for (std::int64_t j = 0; j < length; ++j) {
        const std::int64_t page = integer_at(inputs.block_table, n * entries + j / size);
        copy_key(*from, page, j % size, *to, n, j);
      }
    }
  }
  return dense;
}

}  // namespace abacist::cli
