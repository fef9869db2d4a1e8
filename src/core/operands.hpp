// The one list of operands: names, and what each pass does with them.
#pragma once

#include <cstdint>

#include "abacist/problem.hpp"

namespace abacist::core {

enum class Use : std::uint8_t { unused, optional_input, input, optional_output, output };

constexpr bool is_required(Use use) { return use == Use::input || use == Use::output; }
constexpr bool is_output(Use use) { return use == Use::optional_output || use == Use::output; }

struct OperandRule {
  const char* name;
  TensorSpec Operands::*spec;
  Use forward;
  Use backward;

  constexpr Use in(Pass pass) const { return pass == Pass::forward ? forward : backward; }
};

inline constexpr OperandRule kOperands[] = {
    {"q", &Operands::q, Use::input, Use::input},
    {"k", &Operands::k, Use::input, Use::input},
    {"v", &Operands::v, Use::input, Use::input},
    {"o", &Operands::o, Use::output, Use::input},
    {"lse", &Operands::lse, Use::optional_output, Use::input},
    {"d_o", &Operands::d_o, Use::unused, Use::input},
    {"d_lse", &Operands::d_lse, Use::unused, Use::optional_input},
    {"dq", &Operands::dq, Use::unused, Use::output},
    {"dk", &Operands::dk, Use::unused, Use::output},
    {"dv", &Operands::dv, Use::unused, Use::output},
    {"alibi_slopes", &Operands::alibi_slopes, Use::optional_input, Use::optional_input},
    {"bias", &Operands::bias, Use::optional_input, Use::optional_input},
    {"d_bias", &Operands::d_bias, Use::unused, Use::optional_output},
    {"visible", &Operands::visible, Use::optional_input, Use::optional_input},
    {"sinks", &Operands::sinks, Use::optional_input, Use::optional_input},
    {"d_sinks", &Operands::d_sinks, Use::unused, Use::optional_output},
    {"cu_seqlens_q", &Operands::cu_seqlens_q, Use::optional_input, Use::optional_input},
    {"cu_seqlens_k", &Operands::cu_seqlens_k, Use::optional_input, Use::optional_input},
    {"block_table", &Operands::block_table, Use::optional_input, Use::unused},
    {"key_lengths", &Operands::key_lengths, Use::optional_input, Use::optional_input},
};

}  // namespace abacist::core
