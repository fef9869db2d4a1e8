"""A small character-level transformer learns a real text, with eager attention and with Abacist.

    python train_characters.py [--steps 1000] [--plot losses.svg]

The text is the first chapter of Alice's Adventures in Wonderland (public domain). Both runs begin
with the same weights and see the same batches; their losses differ by rounding. --plot needs
matplotlib.
"""

import argparse
import pathlib
import time

import torch

import abacist

TEXT = pathlib.Path(__file__).parents[2] / "data" / "alice_chapter_1.txt"
CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 128, 8, 64, 4, 2


def eager(q, k, v):
    """Causal attention that writes its scores; [b, s, h, d]."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def exact(q, k, v):
    return abacist.attention(q, k, v, causal=True)


class Block(torch.nn.Module):
    def __init__(self, attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, characters: int, attention) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(characters, WIDTH)
        self.place = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        torch.nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = torch.nn.Sequential(*(Block(attention) for _ in range(LAYERS)))
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, characters))

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.place))


def train(attention, steps: int) -> list[float]:
    """The loss of every step, in nats per character."""
    text = TEXT.read_text(encoding="utf-8")
    known = sorted(set(text))
    data = torch.tensor([known.index(c) for c in text])
    torch.manual_seed(1)
    model = Model(len(known), attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        start = torch.randint(len(data) - CONTEXT, (BATCH, 1))
        tokens = data[start + torch.arange(CONTEXT + 1)]
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plot(losses: dict[str, list[float]], path: str) -> None:
    import matplotlib

    matplotlib.use("svg" if path.endswith(".svg") else "agg")
    matplotlib.rcParams["svg.hashsalt"] = "abacist"  # the same bytes every time
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 4.5), height_ratios=[3, 1.4])
    a, b = losses.values()
    top.plot(a, color="#bbbbbb", linewidth=3.5, label="eager")
    top.plot(b, color="#b3261e", linewidth=1, label="Abacist")
    top.set(ylabel="loss, nats per character", title="The same training run with two attentions")
    top.legend(frameon=False)
    apart = [(step, abs(x - y)) for step, (x, y) in enumerate(zip(a, b)) if x != y]
    bottom.semilogy(*zip(*apart), ".", color="#333333", markersize=2)
    bottom.set(xlabel="step", ylabel="|difference|")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    losses = {}
    for name, attention in (("eager", eager), ("abacist", exact)):
        begin = time.process_time()
        losses[name] = train(attention, arguments.steps)
        seconds = time.process_time() - begin
        print(f"{name}: loss {losses[name][0]:.4f} to {losses[name][-1]:.4f}, {seconds:.1f} s of CPU")
    apart = max(abs(x - y) for x, y in zip(*losses.values()))
    print(f"largest difference of a loss: {apart:.1e}")
    if arguments.plot:
        plot(losses, arguments.plot)


if __name__ == "__main__":
    main()
