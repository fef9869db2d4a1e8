#include "options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "user_error.hpp"

namespace abacist::cli {
namespace {

std::int64_t parse_bound(std::string_view text, const std::string& whole) {
  if (text == "inf") return kUnbounded;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0) {
    throw UserError(
        fmt::format("--window is \"{}\", must be L,R: two whole numbers from 0, or inf", whole));
  }
  return value;
}

Window parse_window(const std::string& text) {
  const std::size_t comma = text.find(',');
  const std::string_view all(text);
  if (comma == text.npos) return {parse_bound("", text), 0};  // throws
  return {parse_bound(all.substr(0, comma), text), parse_bound(all.substr(comma + 1), text)};
}

}  // namespace

void ScoreArguments::add_to(CLI::App& command) {
  const std::string group = "Mask and score";
  command.add_flag("--causal", causal, "A query sees no later key")->group(group);
  command
      .add_option("--align", align,
                  "Where the queries stand: bottom-right (the last query at the last key) or "
                  "top-left")
      ->check(CLI::IsMember({"bottom-right", "top-left"}))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--window", window,
                  "L,R: a query sees L keys to its left and R to its right; inf is no bound")
      ->group(group);
  command.add_option("--scale", scale, "Factor of the scores (default 1/sqrt(d_qk))")->group(group);
  command.add_option("--softcap", softcap, "Scores become cap * tanh(score / cap); 0 is none")
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--alibi", alibi,
                  "Slopes of a linear bias: a file with [h_q] or [b, h_q] numbers, or auto")
      ->group(group);
  command
      .add_option("--bias", bias,
                  "Added to the scores: a file with [b|1, h_q|1, s_q|1, s_k] numbers (leading axes "
                  "may lack), or random[:AXES], AXES of b, h, q being the axes that are not 1")
      ->group(group);
  command
      .add_option("--visible", visible,
                  "Boolean mask, false hides: a file with [b|1, h_q|1, s_q|1, s_k] booleans, or "
                  "random[:AXES]")
      ->group(group);
  command.add_option("--sinks", sinks, "Attention sinks: a file with [h_q] numbers, or random")
      ->group(group);
  command.add_option("--dropout", dropout, "Probability that a probability is dropped")
      ->capture_default_str()
      ->group(group);
  command.add_option("--dropout-seed", dropout_seed, "Which ones are dropped")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->group(group);
  add_lengths_to(command);
}

void ScoreArguments::add_lengths_to(CLI::App& command) {
  const std::string group = "Lengths and pages";
  command
      .add_option("--key-lengths", key_lengths,
                  "Keys of each sequence: N,N,..., a file with [b] whole numbers, or random")
      ->group(group);
  for (auto [name, value] :
       {std::pair{"--cu-seqlens-q", &cu_seqlens_q}, {"--cu-seqlens-k", &cu_seqlens_k}}) {
    command
        .add_option(name, *value,
                    "Sequences behind one another, [total, h, d]: 0,N,N,... or a file with [b + 1] "
                    "whole numbers, where each begins and the last ends")
        ->group(group);
  }
  command
      .add_option(
          "--block-table", block_table,
          "K and V are pools [pages, page_size, h_k, d] with this table of page ids, a file "
          "with [b, max_pages] whole numbers; needs --key-lengths")
      ->group(group);
  command
      .add_option("--page-size", page_size,
                  "Put K and V into pages of so many rows first, in random order")
      ->check(CLI::Range(std::int64_t{1}, kMaxPageSize))
      ->group(group);
}

Options ScoreArguments::options() const {
  Options options;
  options.mask.causal = causal;
  options.mask.align = align == "top-left" ? Align::top_left : Align::bottom_right;
  if (!window.empty()) options.mask.window = parse_window(window);
  options.score.scale = scale;
  options.score.softcap = softcap;
  options.dropout = {dropout, dropout_seed};
  return options;
}

std::string ScoreArguments::text() const {
  std::string text;
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (causal) add("causal");
  if (!window.empty()) add("window " + window);
  if (text.empty()) add("no mask");
  if (align == "top-left") add("top-left");
  if (scale) add(fmt::format("scale {}", *scale));
  if (softcap != 0.0) add(fmt::format("softcap {}", softcap));
  if (!alibi.empty()) add("ALiBi");
  if (!bias.empty()) add("bias");
  if (!visible.empty()) add("boolean mask");
  if (!sinks.empty()) add("sinks");
  if (dropout != 0.0) add(fmt::format("dropout {} (seed {})", dropout, dropout_seed));
  if (!key_lengths.empty()) add("key lengths");
  if (varlen()) add("varlen");
  if (!block_table.empty()) add("pages");
  if (page_size > 0) add(fmt::format("pages of {}", page_size));
  return text;
}

void RunArguments::add_to(CLI::App& command) {
  command
      .add_option("--backend", backend,
                  "cpu, cuda, or reference (float64, slow); default: the first that serves")
      ->check(CLI::IsMember({"automatic", "cpu", "reference", "cuda"}))
      ->capture_default_str();
  command.add_option("--device", device,
                     "Where Q, K and V are put: cpu, cuda, or cuda:N (default: cpu; cuda with "
                     "--backend cuda)");
  command.add_option("--threads", threads, "At most so many threads; 0: as many as allowed")
      ->check(CLI::Range(0, kMaxThreads))
      ->capture_default_str();
  command.add_flag("--batch-invariant", batch_invariant,
                   "The bits of a sequence's results depend on that sequence alone");
}

Place RunArguments::place() const {
  Place place;
  place.plan.threads = threads;
  place.plan.batch_invariant = batch_invariant;
  for (const Backend known : {Backend::cpu, Backend::reference, Backend::cuda}) {
    if (backend == to_string(known)) place.plan.backend = known;
  }
  place.device = parse_device(device.empty() ? (backend == "cuda" ? "cuda" : "cpu") : device);
  return place;
}

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceType::cuda, 0};
  Device device{DeviceType::cuda, 0};
  const std::string_view number =
      std::string_view(text).substr(std::min<std::size_t>(5, text.size()));
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), device.index);
  const bool whole = error == std::errc{} && end == number.data() + number.size();
  if (!text.starts_with("cuda:") || !whole || device.index < 0) {
    throw UserError(fmt::format("--device is \"{}\", must be cpu, cuda or cuda:N", text));
  }
  return device;
}

void SizeArguments::add_to(CLI::App& command, CLI::Option* enabling) {
  const auto add = [&](const char* names, auto& value, const char* text) {
    CLI::Option* option = command.add_option(names, value, text)->group("Sizes");
    if (enabling != nullptr) option->needs(enabling);
    return option;
  };
  add("--b", b, "Batch")->capture_default_str();
  add("--s-q,-s", s_q, "Number of queries")->capture_default_str();
  add("--s-k", s_k, "Number of keys (default: as queries)");
  add("--h-q,--heads", h_q, "Query heads")->capture_default_str();
  add("--h-k", h_k, "Key/value heads (default: as query heads)");
  add("--d-qk,-d", d_qk, "Head dimension of Q and K")->capture_default_str();
  add("--d-v", d_v, "Head dimension of V (default: as Q)");
  add("--type", dtype, "f32, bf16, f16, or f64 (for --backend reference)")->capture_default_str();
  add("--seed", seed, "Seed of the random data")->capture_default_str();
}

SizeArguments SizeArguments::resolved() const {
  SizeArguments sizes = *this;
  if (sizes.s_k == -1) sizes.s_k = sizes.s_q;
  if (sizes.h_k == -1) sizes.h_k = sizes.h_q;
  if (sizes.d_v == -1) sizes.d_v = sizes.d_qk;
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  for (const auto& [name, value] : {std::pair{"--b", sizes.b},
                                    {"--s-q", sizes.s_q},
                                    {"--s-k", sizes.s_k},
                                    {"--h-q", sizes.h_q},
                                    {"--h-k", sizes.h_k},
                                    {"--d-qk", sizes.d_qk},
                                    {"--d-v", sizes.d_v}}) {
    if (value < 0 || value > kMost) {
      throw UserError(fmt::format("{} is {}, must be from 0 to 2^40", name, value));
    }
  }
  return sizes;
}

void FileArguments::add_to(CLI::App& command) {
  const std::string group = "Inputs";
  command.add_option("file", all, "A .safetensors file with the tensors q, k and v")->group(group);
  command.add_option("--q", q, "FILE.npy or FILE.safetensors[:NAME]")->group(group);
  command.add_option("--k", k, "FILE.npy or FILE.safetensors[:NAME]")->group(group);
  command.add_option("--v", v, "FILE.npy or FILE.safetensors[:NAME]")->group(group);
  command
      .add_option("--layout", layout,
                  "Axes of the files: bshd or bhsd (rank 4), without b (rank 3), s and d (rank 2)")
      ->check(CLI::IsMember({"bshd", "bhsd"}))
      ->capture_default_str()
      ->group(group);
  command
      .add_option("--convert", dtype,
                  "Convert Q, K and V first, to f32, bf16, f16, or f64 (for --backend reference)")
      ->group(group);
}

DType parse_dtype(const std::string& text) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    if (text == to_string(dtype)) return dtype;
  }
  throw UserError(fmt::format(
      "type is \"{}\", must be f32, bf16, f16, or f64 (for --backend reference)", text));
}

Pass parse_pass(const std::string& text) {
  if (text == "forward" || text == "fwd") return Pass::forward;
  if (text == "backward" || text == "bwd") return Pass::backward;
  throw UserError(fmt::format("pass is \"{}\", must be forward or backward", text));
}

}  // namespace abacist::cli
