"""The feature cells of bench/cpu.py: what bias, masks, sinks, windows, softcap, ALiBi and dropout cost per
visible pair beside the plain cell of the same shape, and decode steps beside the rate at which this
machine copies memory.

A group is one shape: its cells (twice each, for the spread of A against A), PyTorch where it has the
cell, and for decode the copy are all interleaved in random order, round by round, so that a ratio
within a group means something. Keys of a row beyond those of cpu.py: `of_plain`, GFLOP/s per visible pair over the plain
cell's; for decode `kv` and `copy` in GB/s and `of_copy`, bytes of K and V read a second over bytes that
a copy reads and writes."""

import dataclasses
import random
import statistics

PAIRED = ["plain", "bias", "mask", "sinks", "window=512", "softcap=30", "alibi", "dropout=0.1"]
TRAINED = ["plain", "dropout=0.1"]
DECODED = ["plain", "paged=16"]
BYTES = {"f32": 4, "bf16": 2, "f16": 2}


@dataclasses.dataclass
class Group:
    name: str
    problems: list  # the first is the plain one


def groups(problem):
    """`problem` makes one: direction, dtype, d, s, causal, heads, feature, s_q."""
    def cells(name, features, *shape, s_q=0):
        return Group(name, [problem(*shape, feature=feature, s_q=s_q) for feature in features])
    yield cells("forward", PAIRED, "fwd", "f32", 64, 2048, False, 8)
    yield cells("forward", PAIRED, "fwd", "f32", 64, 2048, True, 8)
    yield cells("forward", PAIRED, "fwd", "bf16", 128, 2048, True, 4)
    yield cells("backward", TRAINED, "bwd", "f32", 64, 2048, True, 4)
    yield cells("decode", DECODED, "fwd", "f32", 128, 32768, False, 8, s_q=1)
    yield cells("decode", DECODED, "fwd", "bf16", 128, 32768, False, 8, s_q=1)


@dataclasses.dataclass
class Cell:
    """As cpu.Cell, with its group."""
    cell: object  # a cpu.Cell
    group: str
    plain: object  # the cpu.Cell of the plain problem
    copy: list  # GB/s of each burst; decode alone

    def row(self, peak):
        row = self.cell.row(peak) | {"group": self.group}
        ours = self.cell.rate()
        row["of_plain"] = round(ours / self.plain.rate(), 3)
        if self.copy:
            problem = self.cell.problem
            flops = problem.heads * problem.s * problem.d * 4
            kv_bytes = 2 * problem.heads * problem.s * problem.d * BYTES[problem.dtype]
            kv = ours * kv_bytes / flops
            copy = statistics.median(self.copy)
            row |= {"kv": round(kv, 2), "copy": round(copy, 2), "of_copy": round(kv / copy, 3)}
        return row


HEADER = (f"\n{'pass':<5}{'dtype':<6}{'d':>4}{'s_q':>6}{'s':>7}{'heads':>6} {'mask':<7}{'feature':<13}"
          f"{'abacist':>9}{'torch':>9}{'ratio':>7}{'of plain':>9}{'of peak':>9}{'KV GB/s':>9}{'of copy':>9}{'A/A':>7}")


def print_row(row):
    def text(key, form):
        return format(row[key], form) if row.get(key) is not None else "-"
    print(f"{row['pass']:<5}{row['dtype']:<6}{row['d_qk']:>4}{row['s_q']:>6}{row['s']:>7}{row['heads']:>6} "
          f"{'causal' if row['causal'] else 'full':<7}{row['feature']:<13}{row['abacist']:>9.1f}"
          f"{text('torch', '.1f'):>9}{text('ratio', '.2f'):>7}{row['of_plain']:>9.2f}"
          f"{row['share_of_fma_peak']:>9.1%}{text('kv', '.1f'):>9}{text('of_copy', '.1%'):>9}{row['spread']:>7.1%}",
          flush=True)


def measure_group(group, make_cell, abacist, torch, arguments, peaks):
    """Every burst of a group's cells, round by round in random order."""
    cells = {problem: make_cell(problem) for problem in group.problems}
    copy = []
    bursts = []
    for problem, cell in cells.items():
        bursts += [(abacist, problem, cell.abacist), (abacist, problem, cell.again)]
        if torch and torch.offers(problem):
            bursts.append((torch, problem, cell.torch))
    for contender, problem, _ in bursts:  # each once, untimed
        contender.burst(problem, 0)
    if group.name == "decode":
        bursts.append((None, None, copy))
    for _ in range(arguments.rounds):
        for contender, problem, rates in random.sample(bursts, len(bursts)):
            if contender is None:
                rates.append(abacist.copy_gbytes(arguments.seconds))
            else:
                rates.append(problem.flops / contender.burst(problem, arguments.seconds) / 1e9)
        peaks.append(abacist.peak_gflops())
    for contender in filter(None, (abacist, torch)):
        contender.forget()
    return [Cell(cell, group.name, cells[group.problems[0]], copy) for cell in cells.values()]


def measure(make_problem, make_cell, abacist, torch, arguments, peaks):
    """The cells of every group, printed as they come."""
    print(HEADER)
    cells = []
    for group in groups(make_problem):
        cells += (measured := measure_group(group, make_cell, abacist, torch, arguments, peaks))
        for cell in measured:
            print_row(cell.row(max(peaks)))
    return cells
