"""A Ray cluster of several nodes on one machine, in a process of its own: run as a script, it takes commands.

It prints its address. Then each line of its input is a command, which it answers with a line: `add` starts a node and
answers with its id; `add PATH` does so with this PYTHONPATH; `kill ID` kills the node whose id has this beginning. It
ends with all nodes at the end of its input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STORE_BYTES = 80 << 20
"""Number of bytes of the object store, close to the least that Ray accepts. Nothing uses it."""


class Nodes:
    """The cluster, for the process that started it. Its head runs no replica."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.process_id = process.pid
        self.address = self._answer()

    def add(self, python_path: str = "") -> str:
        """Start a node with room for one replica. Returns its id. `python_path` replaces its PYTHONPATH."""
        return self._tell(f"add {python_path}")

    def kill(self, node: str) -> None:
        """Kill a node, with all that runs on it. `node` is the beginning of its id."""
        self._tell(f"kill {node}")

    def _tell(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster's process has ended"
        return line


@contextmanager
def ray_nodes(count: int) -> Iterator[Nodes]:
    """A cluster with a head and `count` nodes."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        nodes = Nodes(process)
        for _ in range(count):
            nodes.add()
        yield nodes
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Run the cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES})
    nodes = {}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "add":
            path = {"env_vars": {"PYTHONPATH": rest[0]}} if rest else {}
            node = cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, **path)
            nodes[node.node_id] = node
            print(node.node_id, flush=True)
        else:
            found = next(each for each in nodes if each.startswith(rest[0]))
            cluster.remove_node(nodes.pop(found), allow_graceful=False)
            print(found, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
