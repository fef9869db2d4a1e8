// The problem that tensors pose. (The one-line calls are in plan.cpp.)
#include "abacist/attention.hpp"

namespace abacist {
namespace {

/// The operands that both passes have.
template <class Tensors>
Problem shared_problem(Pass pass, const Tensors& t, const Options& options) {
  Problem problem{pass, {}, options};
  Operands& x = problem.operands;
  x.q = t.q;
  x.k = t.k;
  x.v = t.v;
  x.o = t.o;
  x.lse = t.lse;
  x.alibi_slopes = t.alibi_slopes;
  x.cu_seqlens_q = t.cu_seqlens_q;
  x.cu_seqlens_k = t.cu_seqlens_k;
  x.bias = t.bias;
  x.visible = t.visible;
  x.sinks = t.sinks;
  x.key_lengths = t.key_lengths;
  return problem;
}

}  // namespace

Problem make_problem(const ForwardTensors& t, const Options& options) {
  Problem problem = shared_problem(Pass::forward, t, options);
  problem.operands.block_table = t.block_table;
  return problem;
}

Problem make_problem(const BackwardTensors& t, const Options& options) {
  Problem problem = shared_problem(Pass::backward, t, options);
  Operands& x = problem.operands;
  x.d_o = t.d_o;
  x.d_lse = t.d_lse;
  x.dq = t.dq;
  x.dk = t.dk;
  x.dv = t.dv;
  x.d_sinks = t.d_sinks;
  x.d_bias = t.d_bias;
  return problem;
}

}  // namespace abacist
