"""A training step through attention: loss, gradients, one step of an optimiser.

    python torch_training_step.py
"""

import torch

import abacist


class Attention(torch.nn.Module):
    """Causal self-attention with grouped heads."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads, kv_heads, kv_heads]
        self.d = width // heads
        self.project = torch.nn.Linear(width, self.d * sum(self.sizes))
        self.out = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (sum(self.sizes), self.d))
        q, k, v = heads.split(self.sizes, dim=2)  # [b, s, h, d], read where they lie
        return self.out(abacist.attention(q, k, v, causal=True).flatten(2))


torch.manual_seed(1)
model = Attention(width=128, heads=8, kv_heads=2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x, target = torch.randn(2, 4, 256, 128).unbind(0)
losses = []
for step in range(5):
    loss = (model(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    print(f"step {step}: loss {losses[-1]:.4f}")
assert losses == sorted(losses, reverse=True)
