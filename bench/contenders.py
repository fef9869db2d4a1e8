"""What bench/cpu.py times: each contender runs one burst of one problem and says how long a run took."""

import json
import os
import subprocess
import time

DTYPES = ("f32", "bf16", "f16")


class Abacist:
    """The command line tool's `bench --serve`: one JSON problem a line in, one JSON answer a line out."""

    name = "abacist"

    def __init__(self, program, threads):
        self.threads = threads
        self.kernel = ""  # of the last burst, e.g. cpu.forward.avx512
        self.process = subprocess.Popen([program, "bench", "--serve"], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.version = subprocess.run([program, "--version"], capture_output=True, text=True,
                                      check=True).stdout.strip().split()[-1]

    def ask(self, question):
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"abacist bench --serve ended with {self.process.wait()} at {question}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"abacist: {answer['error']} at {question}")
        return answer

    def burst(self, problem, seconds):
        """Seconds of one run, averaged over a burst of at least `seconds`. The data is made, and one
        run done, before the first burst of a problem."""
        h, s, d = problem.heads, problem.s, problem.d
        answer = self.ask({"pass": problem.direction, "dtype": problem.dtype, "b": 1,
                           "s_q": problem.queries, "s_k": s, "h_q": h, "h_k": h, "d_qk": d, "d_v": d,
                           "causal": problem.causal, "feature": problem.feature,
                           "threads": self.threads, "min_seconds": seconds})
        self.kernel = answer["kernel"]
        return answer["seconds_per_run"]

    def forget(self):
        """Frees the data of the problems so far."""
        self.ask({"drop": True})

    def peak_gflops(self):
        """FMA rate of registers alone, on the same threads."""
        return self.ask({"peak": True, "threads": self.threads})["flops_per_second"] / 1e9

    def copy_gbytes(self, seconds):
        """GB/s read plus written by copies of 256 MiB, on the same threads."""
        question = {"copy": True, "threads": self.threads, "min_seconds": seconds}
        return self.ask(question)["bytes_per_second"] / 1e9

    def close(self):
        self.process.stdin.close()
        self.process.wait()


class Torch:
    """scaled_dot_product_attention of PyTorch, in this process. Its threads sleep between bursts:
    spinning ones would take the cores from the other contender."""

    name = "torch"

    def __init__(self, threads):
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads),
                          OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")
        try:
            import torch  # only now: OpenMP reads these once
        except ImportError as error:
            raise SystemExit(f"PyTorch is missing ({error}): pip install torch, another python3, "
                             "or --no-torch") from None
        self.torch = torch
        torch.set_num_threads(threads)
        self.version = torch.__version__
        self.capability = torch.backends.cpu.get_cpu_capability()
        self.prepared = {}

    @staticmethod
    def offers(problem):
        """Whether one call of PyTorch computes it, and is worth waiting for: its dropout writes the score
        matrix, takes seconds, and is timed in two cells only."""
        if problem.value("dropout") is not None:
            return problem.direction == "bwd" or not problem.causal
        return problem.feature in ("plain", "bias", "mask")

    def prepare(self, problem):
        """A function that runs the problem once, on random normal data of the same memory layout as
        Abacist's, [b, s, h, d]; a bias and a boolean mask are [1, 1, s_q, s_k]."""
        torch = self.torch
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[problem.dtype]
        generator = torch.Generator().manual_seed(1)
        q, k, v, d_o = (torch.randn((1, rows, problem.heads, problem.d), generator=generator)
                        .to(dtype).transpose(1, 2)
                        for rows in (problem.queries, problem.s, problem.s, problem.queries))
        options = {"is_causal": problem.causal, "dropout_p": problem.value("dropout") or 0.0}
        if problem.feature in ("bias", "mask"):
            mask = torch.randn((1, 1, problem.queries, problem.s), generator=generator).to(dtype)
            seen = torch.ones_like(mask, dtype=torch.bool)
            if problem.causal:  # it takes a mask or is_causal, not both
                seen = seen.tril(problem.s - problem.queries)
            both = mask.masked_fill(~seen, float("-inf")) if problem.feature == "bias" else (mask > 0) & seen
            options |= {"attn_mask": both, "is_causal": False}

        def attention():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        if problem.direction == "fwd":
            def forward():
                with torch.inference_mode():
                    attention()
            return forward
        inputs = [x.requires_grad_() for x in (q, k, v)]
        o = attention()
        return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)

    def burst(self, problem, seconds):
        if problem not in self.prepared:
            self.prepared[problem] = self.prepare(problem)
        run = self.prepared[problem]
        run()  # wakes the threads, fills the caches
        runs, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds or runs == 0:
            run()
            runs += 1
        return elapsed / runs

    def forget(self):
        self.prepared = {}
