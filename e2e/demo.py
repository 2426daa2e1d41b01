"""`make demo`: from nothing to a refit on a real Kubernetes, step by step, with what a person would type.

    python -m e2e.demo [PICTURE.svg]    a path keeps what was shown as a picture

Everything shown is read from the cluster; every generator's answers are compared with an engine that loaded the version's checkpoint itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from refit_api import names
from rich.console import Console
from rich.table import Table

from e2e.cluster.progress import failed
from e2e.fleet import GROUP, Fleet
from e2e.groups import HTTP_PORT, refit_group
from e2e.installation import Installation, install
from e2e.kubectl import KubectlError, eventually
from e2e.reference import Reference, reference

NAMESPACE = "demo"
PROMPTS = ([1, 2, 3, 4], [7, 70, 170], [300, 200, 100, 50, 25])
TOKENS = 12
VERSIONS = 5
RIGHT = "[green]✓[/]"


@dataclass
class Seen:
    """What the demo has found out about one version."""

    step: int
    bytes: int
    answers: set[str] = field(default_factory=set)
    """Generators that answered as the version's checkpoint does."""
    wire: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)


class Demo:
    """Five versions into two generators, two more from a peer, one killed and back."""

    def __init__(self, fleet: Fleet, reference: Reference, console: Console) -> None:
        self.fleet, self.reference, self.console = fleet, reference, console
        self.seen: dict[int, Seen] = {}

    def run(self) -> None:
        self.apply()
        for count in range(1, VERSIONS + 1):
            self.version(count)
        self.scale_out()
        self.kill_one()
        self.show()

    def title(self, text: str) -> None:
        self.console.print(f"\n[bold cyan]{text}[/]")

    def typed(self, *arguments: str) -> None:
        """A kubectl command and what it prints."""
        self.console.print(f"[dim]$ kubectl {' '.join(arguments)}[/]", soft_wrap=True)
        self.console.print(self.fleet.kubectl(*arguments).rstrip(), markup=False, highlight=False, soft_wrap=True)

    def apply(self) -> None:
        self.title("A RefitGroup: one trainer pod (Megatron, TP2), two generator pods (vLLM, TP1)")
        pods = self.fleet.pods_of
        trainer = pods.trainer(VERSIONS, controlled=True, TRAINER_INTERVAL_SECONDS="1")
        group = refit_group(GROUP, self.fleet.namespace, trainer, pods.vllm(), replicas=2, custom=False)
        self.fleet.kubectl.apply(group)
        short = {**group["spec"], "trainer": {"template": "..."}, "generators": {**group["spec"]["generators"], "template": "..."}}
        self.console.print(yaml.safe_dump({"kind": "RefitGroup", "spec": short}, sort_keys=False).rstrip(), markup=False, style="dim")
        self.fleet.allow(1)
        with self.console.status("vLLM starts with dummy weights; the trainer's first version makes the pods ready"):
            eventually("both generators serve the first version", lambda: self.common(0), 480, 2)

    def common(self, above: int) -> int | None:
        """The version that all generators serve, if it is a newer one."""
        serving = self.fleet.serving()
        found = set(serving.values())
        return found.pop() if len(found) == 1 and serving and min(found) > above else None

    def version(self, count: int) -> None:
        previous = max(self.seen, default=0)
        self.fleet.allow(count)
        number: int = eventually("all generators serve the next version", lambda: self.common(previous), 480, 0.5)
        found = next(item for item in self.fleet.versions() if item["spec"]["version"] == number)
        self.seen[number] = Seen(found["spec"]["trainerStep"], found["status"]["shards"]["bytes"])
        for pod in self.fleet.generators():
            self.compare(pod, number)
        seen = self.seen[number]
        stalls = " ".join(f"{seconds * 1e3:.1f}" for seconds in seen.stall)
        self.console.print(f"{RIGHT} version {number} (step {seen.step}): {len(seen.answers)} generators, stalls {stalls} ms, answers as its checkpoint's")

    def compare(self, pod: str, number: int) -> None:
        """The pod's greedy answers must be those of an engine that loaded the checkpoint."""
        checkpoint = self.fleet.exports / str(number)
        eventually(f"the checkpoint of version {number} is written", lambda: (checkpoint / "config.json").exists(), 60, 0.2)
        expected = self.reference.generate(checkpoint, PROMPTS, TOKENS)
        seen, found = self.seen[number], self.answers(pod)
        if found != expected:
            raise AssertionError(f"{pod} answers {found}, an engine that loaded the checkpoint of version {number} answers {expected}")
        seen.answers.add(pod)
        for timings in eventually("it says how long each part took", lambda: self.timings(pod), 30, 0.2):
            seen.wire.append(timings.get("pull", 0.0))
            seen.stall.append(sum(timings[stage] for stage in ("pause", "install", "label", "resume")))

    def timings(self, pod: str) -> list[dict[str, float]] | None:
        """Seconds by part, per rank; None before the commit has ended."""
        ranks = [{timing["stage"]: timing["seconds"] for timing in rank["timings"]} for rank in self.fleet.ask(pod, "/refit/status")["ranks"]]
        return ranks if all("resume" in parts for parts in ranks) else None

    def answers(self, pod: str) -> list[list[int]]:
        body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

        def ask(prompt: list[int]) -> list[int]:
            answer = json.loads(self.fleet.kubectl.pod_post(self.fleet.namespace, pod, HTTP_PORT, "/v1/completions", {**body, "prompt": prompt}))
            tokens: list[int] = answer["choices"][0]["token_ids"]
            return tokens

        return [ask(list(prompt)) for prompt in PROMPTS]

    def scale_out(self) -> None:
        self.title("Scale out: two more generators join from their peers, nobody pauses")
        number, old = max(self.seen), set(self.fleet.generators())
        self.typed("scale", f"refitgroup/{GROUP}", "-n", self.fleet.namespace, "--replicas=4")
        with self.console.status("two vLLM engines start; then they read from generators that hold the version"):
            self.fleet.until_all_serve(number, 4, 480)
        table = Table("generator", "read from", "bytes", "answers right")
        for pod in self.fleet.generators():
            self.compare(pod, number)
            for source, count in self.sources(pod, joined=pod not in old).items():
                table.add_row(pod, source, size(count), RIGHT)
        self.console.print(table)

    def kill_one(self) -> None:
        self.title("Kill one: its replacement comes back synced")
        number, old = max(self.seen), set(self.fleet.generators())
        victim = min(old)
        self.typed("delete", "pod", victim, "-n", self.fleet.namespace, "--grace-period=0", "--force", "--wait=false")
        with self.console.status("the replacement starts, registers, reads from a peer, verifies, installs, and only then is ready"):
            (new,) = set(self.fleet.until_all_serve(number, 4, 480)) - old
        self.compare(new, number)
        sources = self.sources(new, joined=True)
        self.console.print(f"{RIGHT} four generators serve version {number} again; {new} read it from {', '.join(sources)} and answers as its checkpoint")

    def sources(self, pod: str, joined: bool) -> dict[str, int]:
        """Bytes that the pod read for the version it serves, by the pod that sent them; for one that joined, only peers may have."""
        (rank,) = self.fleet.ask(pod, "/refit/status")["ranks"]
        if joined and {read["role"] for read in rank["reads"]} != {names.ROLE_GENERATOR}:
            raise AssertionError(f"{pod} did not join from peers alone: {rank}")
        called = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self.fleet.pods(names.ROLE_GENERATOR) + self.fleet.pods(names.ROLE_TRAINER)}
        return {called.get(read["podUid"], read["podUid"]): read["bytes"] for read in rank["reads"]}

    def show(self) -> None:
        self.title("What happened")
        eventually("the newest version's status counts four generators", lambda: self.fleet.versions()[-1]["status"]["adoption"]["installed"] == 4, 60)
        table = Table("version", "trainer step", "bytes", "wire (median)", "stall (median)", "stall (max)", "answers are right")
        for number, seen in self.seen.items():
            row = (ms(median(seen.wire)), ms(median(seen.stall)), ms(max(seen.stall)))
            table.add_row(str(number), str(seen.step), size(seen.bytes), *row, f"of {len(seen.answers)} generators")
        self.console.print(table)
        self.typed("get", "refitgroups,weightversions,pods", "-n", self.fleet.namespace)
        kubeconfig = str(self.fleet.installation.cluster.kubeconfig).replace(str(Path.home()), "$HOME", 1)
        self.console.print(
            f"\n[bold]Try next[/] (the cluster stays up; `make down` ends it)\n"
            f"  export KUBECONFIG={kubeconfig}\n"
            f"  kubectl describe refitgroup {GROUP} -n {self.fleet.namespace}\n"
            f"  kubectl scale refitgroup/{GROUP} -n {self.fleet.namespace} --replicas=1\n"
            f"  kubectl patch refitgroup {GROUP} -n {self.fleet.namespace} --type=merge -p '{json.dumps({'spec': {'rollout': {'paused': True}}})}'\n"
            "  docs/quickstart.md explains each of them",
            soft_wrap=True,
            highlight=False,
        )


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} B"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def show(console: Console, installation: Installation | None = None, after: Callable[[Fleet], Any] = lambda fleet: None) -> dict[int, Seen]:
    """Runs it in a fresh namespace; on failure prints what the cluster says."""
    began = time.monotonic()
    installation = installation or install()
    remove = Fleet(installation, NAMESPACE, installation.pods).remove
    remove()
    fleet = Fleet.create(installation, NAMESPACE)
    with tempfile.TemporaryDirectory(prefix="refit-demo-") as folder, reference(Path(folder)) as engine:
        demo = Demo(fleet, engine, console)
        try:
            demo.run()
            after(fleet)
        except (AssertionError, KubectlError, RuntimeError):
            console.print(fleet.describe(), markup=False, highlight=False)
            raise
    console.print(f"\n[dim]{time.monotonic() - began:.0f} s in all[/]")
    return demo.seen


def main(arguments: list[str]) -> None:
    console = Console(record=bool(arguments))
    if not console.is_terminal:
        console = Console(width=140, record=bool(arguments))  # a table in a log need not fit a screen
    try:
        show(console)
    except (AssertionError, KubectlError, RuntimeError) as error:
        failed(error)
        sys.exit(1)
    if arguments:
        console.save_svg(arguments[0], title="make demo")


if __name__ == "__main__":
    main(sys.argv[1:])
