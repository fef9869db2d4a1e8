#include "support/buffer.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "core/numeric.hpp"

namespace abacist::testing {
namespace {

constexpr std::int64_t kGuard = 64;  // elements on both sides

/// Assigns strides; returns the elements that the tensor spans and where position 0, ..., 0 lies.
std::pair<std::int64_t, std::int64_t> lay_out(TensorSpec& spec, const Layout& layout,
                                              Random& random) {
  std::array<std::size_t, kMaxRank> order{};
  const auto rank = static_cast<std::size_t>(spec.rank);
  const std::int64_t step = layout.tma ? 8 : 1;
  const std::int64_t fixed = layout.tma ? 1 : 0;                   // axes that stay innermost
  for (std::size_t a = 0; a < rank; ++a) order[a] = rank - 1 - a;  // innermost first
  if (layout.random && random.chance(0.5)) {
    for (auto a = static_cast<std::int64_t>(rank); a > 1 + fixed; --a) {
      std::swap(order[static_cast<std::size_t>(a - 1)],
                order[static_cast<std::size_t>(random.integer(fixed, a - 1))]);
    }
  }
  std::int64_t broadcast = -1;
  // Not along d: sums of equal terms round the same way at every step, an error of n u, not sqrt(n)
  // u.
  if (layout.broadcast && random.chance(0.15) && spec.rank > 1) {
    broadcast = random.integer(0, spec.rank - 2);
  }
  std::int64_t next =
      layout.random && !layout.tma && random.chance(0.25) ? random.integer(2, 3) : 1;
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (std::size_t n = 0; n < rank; ++n) {
    const std::size_t a = order[n];
    const std::int64_t steps = std::max<std::int64_t>(spec.shape[a] - 1, 0);
    if (static_cast<std::int64_t>(a) == broadcast) {
      spec.stride[a] = 0;
      continue;
    }
    const bool negative = layout.random && !layout.tma && random.chance(0.15);
    spec.stride[a] = negative ? -next : next;
    (negative ? lowest : highest) += spec.stride[a] * steps;
    next *= std::max<std::int64_t>(spec.shape[a], 1);
    next = (next + step - 1) / step * step;
    if (layout.random && random.chance(0.3)) next += step * random.integer(1, 9);
  }
  return {highest - lowest + 1, -lowest};
}

}  // namespace

Buffer::Buffer(DType dtype, std::vector<std::int64_t> shape, Layout layout, std::uint64_t stream) {
  Random random(stream ^ 0x6c61796f7574u);
  spec_.dtype = dtype;
  spec_.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), spec_.shape.begin());
  const auto [span, first] = lay_out(spec_, layout, random);
  const std::int64_t offset =
      layout.odd_offset ? 1 : (layout.random ? random.integer(0, 7) * (layout.tma ? 8 : 1) : 0);
  origin_ = kGuard + offset + first;
  bytes_.assign(static_cast<std::size_t>((2 * kGuard + offset + span) * size_of(dtype)),
                std::byte{0xff});
  freeze();
}

std::int64_t Buffer::size() const {
  return present() ? std::accumulate(spec_.shape.begin(), spec_.shape.begin() + spec_.rank,
                                     std::int64_t{1}, std::multiplies<>())
                   : 0;
}

void Buffer::for_each(const std::function<void(const std::array<std::int64_t, kMaxRank>&,
                                               std::int64_t)>& visit) const {
  if (size() == 0) return;
  std::array<std::int64_t, kMaxRank> index{};
  const auto rank = static_cast<std::size_t>(spec_.rank);
  while (true) {
    std::int64_t offset = 0;
    for (std::size_t a = 0; a < rank; ++a) offset += index[a] * spec_.stride[a];
    visit(index, offset);
    std::size_t a = rank;
    while (a > 0 && ++index[a - 1] == spec_.shape[a - 1]) index[--a] = 0;
    if (a == 0) return;
  }
}

double Buffer::at(const std::array<std::int64_t, kMaxRank>& index) const {
  std::int64_t offset = 0;
  for (std::size_t a = 0; a < kMaxRank; ++a) offset += index[a] * spec_.stride[a];
  return core::load_element(element(0), spec_.dtype, offset);
}

void Buffer::set(const std::array<std::int64_t, kMaxRank>& index, double value) {
  std::int64_t offset = 0;
  for (std::size_t a = 0; a < kMaxRank; ++a) offset += index[a] * spec_.stride[a];
  core::store_element(element(0), spec_.dtype, offset, value);
}

std::vector<double> Buffer::values() const {
  std::vector<double> all;
  all.reserve(static_cast<std::size_t>(size()));
  for_each([&](const auto&, std::int64_t offset) {
    all.push_back(core::load_element(element(0), spec_.dtype, offset));
  });
  return all;
}

void Buffer::fill(const std::function<double()>& next) {
  for_each([&](const auto&, std::int64_t offset) {
    core::store_element(element(0), spec_.dtype, offset, next());
  });
  freeze();
}

void Buffer::fill(const std::vector<double>& values) {
  std::size_t i = 0;
  fill([&] { return values.at(i++); });
}

void Buffer::fill(double value) {
  fill([value] { return value; });
}

std::string Buffer::damage(bool elements_may_change) const {
  std::vector<std::byte> expected = frozen_;
  if (elements_may_change) {
    const auto size = static_cast<std::size_t>(size_of(spec_.dtype));
    for_each([&](const auto&, std::int64_t offset) {
      const std::byte* const from = element(offset);
      std::memcpy(expected.data() + (from - bytes_.data()), from, size);
    });
  }
  const auto [was, is] = std::mismatch(expected.begin(), expected.end(), bytes_.begin());
  if (is == bytes_.end()) return "";
  return "byte " + std::to_string((is - bytes_.begin()) - origin_ * size_of(spec_.dtype)) +
         " from the first element changed from " + std::to_string(std::to_integer<int>(*was)) +
         " to " + std::to_string(std::to_integer<int>(*is));
}

std::vector<std::byte> Buffer::element_bytes() const {
  std::vector<std::byte> all;
  const auto size = size_of(spec_.dtype);
  for_each([&](const auto&, std::int64_t offset) {
    all.insert(all.end(), element(offset), element(offset) + size);
  });
  return all;
}

}  // namespace abacist::testing
