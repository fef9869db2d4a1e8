// The plan as text: what, how, and what it costs.
#include <algorithm>
#include <array>
#include <cstdio>
#include <iterator>
#include <new>
#include <string>

#include "abacist/plan.hpp"
#include "core/operands.hpp"
#include "core/text.hpp"

namespace abacist {
namespace {

using core::to_text;

/// "12.3 GB", or with another unit.
std::string scaled(double value, const char* unit) {
  constexpr std::array<const char*, 7> kPrefixes = {"", "k", "M", "G", "T", "P", "E"};
  std::size_t prefix = 0;
  while (value >= 999.95 && prefix + 1 < kPrefixes.size()) {
    value /= 1000.0;
    ++prefix;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), prefix == 0 ? "%.0f " : "%.1f ", value);
  std::string result = std::string(text.data()) + kPrefixes[prefix] + unit;
  if (result.back() != ' ' && *unit == '\0') result += ' ';
  return result;
}

std::string scaled(const Figure& figure, const char* unit) {
  return (figure.exact ? "" : "at most ") + scaled(static_cast<double>(figure.value), unit);
}

std::string percent(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.1f%%", 100.0 * share);
  return text.data();
}

std::string plural(std::int64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

/// One line: a label, then text.
std::string line(const char* label, const std::string& text) {
  std::array<char, 16> padded{};
  std::snprintf(padded.data(), padded.size(), "%-13s", label);
  return padded.data() + text + "\n";
}

/// How many keys of one side a window has, in the middle of a sentence.
std::string bound(std::int64_t value) {
  return value == kUnbounded ? "all keys" : plural(value, "key");
}

std::string mask_text(const Problem& problem) {
  const Options& options = problem.options;
  const Mask& mask = options.mask;
  std::string text = mask.causal ? "causal" : "";
  const auto add = [&text](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (mask.window != Window{}) {
    add("window of " + bound(mask.window.left) + " to the left" +
        (mask.causal ? "" : " and " + bound(mask.window.right) + " to the right"));
  }
  if (text.empty()) text = "every query sees every key";
  add(mask.align == Align::bottom_right ? "bottom-right aligned" : "top-left aligned");
  if (options.score.scale) add("scale " + to_text(*options.score.scale));
  if (options.score.softcap != 0.0) add("softcap " + to_text(options.score.softcap));
  if (problem.operands.alibi_slopes.present()) add("ALiBi");
  if (problem.operands.bias.present()) add("bias");
  if (problem.operands.visible.present()) add("boolean mask");
  if (problem.operands.sinks.present()) add("sinks");
  if (options.dropout.p != 0.0) add("dropout " + to_text(options.dropout.p));
  if (problem.operands.block_table.present()) {
    add("pages of " + std::to_string(problem.operands.k.shape[1]) + " keys");
  }
  if (problem.operands.key_lengths.present()) add("key lengths");
  return text;
}

std::string operand_lines(const Problem& problem) {
  std::string text;
  for (const core::OperandRule& rule : core::kOperands) {
    const TensorSpec& spec = problem.operands.*rule.spec;
    if (!spec.present()) continue;
    text += (text.empty() ? "" : ", ") + std::string(rule.name) + " " + to_text(spec);
  }
  return line("operands", text);
}

/// Pairs if nothing were masked; 0 where lengths are data.
double all_pairs(const Problem& problem) {
  const Operands& x = problem.operands;
  if (x.cu_seqlens_q.present()) return 0.0;
  double pairs = 1.0;
  for (const std::int64_t extent : {x.q.shape[0], x.q.shape[1], x.q.shape[2], x.k.shape[1]}) {
    pairs *= static_cast<double>(extent);
  }
  return pairs;
}

std::string kernel_lines(const PlanInfo& info) {
  std::string text = line("kernel", info.kernel);
  text += line("tiles", plural(info.rows, "query row") + " x " + plural(info.keys, "key"));
  std::string schedule = plural(info.work_items, "work item") + " on ";
  if (info.grid > 0) schedule += plural(info.grid, "block") + " of ";
  schedule += plural(info.threads, "thread");
  schedule += info.splits > 1 ? "; keys in " + plural(info.splits, "part") + ", merged"
                              : "; keys not split";
  return text + line("schedule", schedule);
}

std::string cost_lines(const Problem& problem, const PlanInfo& info) {
  const double all = all_pairs(problem);
  std::string pairs = scaled(info.visible_pairs, "") + "(query, key) pairs see each other";
  if (all > 0.0) {
    pairs += ", " + percent(static_cast<double>(info.visible_pairs.value) / all) + " of all";
  }
  std::string text = line("scores", pairs);
  text += line("work", scaled(info.flops, "FLOP"));
  std::string traffic = scaled(info.slow_memory_bytes, "B");
  traffic += "; each operand once: " + scaled(info.operand_bytes, "B");
  traffic += "; attention that writes its scores moves " + scaled(info.standard_memory_bytes, "B");
  text += line("slow memory", traffic);
  text += line("workspace", scaled(static_cast<double>(info.workspace_bytes), "B") + ", of which " +
                                scaled(static_cast<double>(info.scratch_bytes_per_thread), "B") +
                                " for each thread");
  std::string same = info.deterministic ? "yes, whatever the threads and the timing" : "no";
  if (info.batch_invariant) same += ", and whatever else is in the batch";
  text += line("same bits", same);
  return text;
}

}  // namespace

std::string explain(const Plan& plan) try {
  const Problem& problem = plan.problem();
  const PlanInfo& info = plan.info();
  const bool backward = problem.pass == Pass::backward;
  std::string text = line("pass", backward ? "backward" : "forward");
  text += operand_lines(problem);
  text += line("mask", mask_text(problem));
  text += kernel_lines(info);
  text += cost_lines(problem, info);
  for (const std::string& declined : info.declined) text += line("passed over", declined);
  text.pop_back();  // lines are divided by line breaks, not ended
  return text;
} catch (const std::bad_alloc&) {
  return {};
}

}  // namespace abacist
