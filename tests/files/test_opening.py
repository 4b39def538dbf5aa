"""Every place of the package that opens a file goes through `holdfast.files`, or has its reason here."""

from __future__ import annotations

import ast
from pathlib import Path

import holdfast

PACKAGE = Path(holdfast.__file__).parent
OPENERS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkfifo", "mknod", "safe_open",
    "save_file", "load_file", "fromfile", "memmap", "open_memmap", "loadtxt", "genfromtxt", "from_file",
    "load_cert_chain", "from_pretrained", "create_engine", "copyfile", "copy2", "copytree",
}  # fmt: skip
"""Names of functions and methods that open a file by its path, in the standard library and in those that we use."""
LOADERS = {"np.load", "numpy.load", "torch.load", "np.save", "numpy.save", "torch.save", "joblib.load"}
"""Names that open a file, but that other functions have too; the module is checked as well."""
SAFE_MODULES = {"holdfast.files.regular", "holdfast.engine.checkpoint"}
"""Modules whose functions of these names open regular files alone. In the second one it is `read_text`."""
NO_FILE = "it opens no file"
KERNEL = "the kernel's file below /proc or /sys"
NAMED = "whoever runs the command names the file, which may be a pipe to another program"
CHECKED = "its name is from `name_of_regular`, or the files were checked before"
OWN = "it is in a directory that was made a moment ago, for this user alone"
REASONS = {
    ("cells.applications.weights", "safe_open"): CHECKED,
    ("cells.applications.weights", "save_file"): "a developer's command writes the package's own files",
    ("cli.batch_mode", "self.batches.files.open"): "`server.jobs.files` opens regular files alone",
    ("cluster.attach_spawner", "Attachment.open"): NO_FILE,
    ("cluster.attach_spawner", "here.write_bytes"): OWN,
    ("cluster.local_spawner", "Path('/proc/meminfo').read_text"): KERNEL,
    ("cluster.ray_spawner", "here.write_bytes"): OWN,
    ("engine.address", "os.open"): "it makes the file, and fails where one is",
    ("engine.checkpoint", "read_text"): "the function that is meant by `SAFE_MODULES`",
    ("engine.profiles", "fresh.write_text"): OWN,
    ("engine.ranks.ranks", "Path(f'/proc/{pid}/stat').read_text"): KERNEL,
    ("engine.ranks.work", "Mailbox.open"): "it maps memory that another process hands over",
    ("cluster.shared_directory", "own.open"): "`OwnDirectory.open`",
    ("lm.models.gguf_metadata", "(directory / 'config.json').write_text"): OWN,
    ("lm.models.gguf_metadata", "(directory / GGUF_FILE).write_text"): OWN,
    ("lm.models.gguf_metadata", "(directory / 'tokenizer_config.json').write_text"): OWN,
    ("lm.models.gguf_metadata", "kind.from_pretrained"): CHECKED,
    ("files.own_directory", "os.open"): "it opens the directory, as one",
    ("files.own_directory", "self.open"): "the function that is meant by this test",
    ("files.regular", "os.open"): "the function that is meant by this test",
    ("files.regular", "read_bytes"): "the function that is meant by this test",
    ("files.results", "Path(path).write_text"): NAMED,
    ("engine.ranks.tuning", "self._trainer.open"): NO_FILE,
    ("lm.devices", "(limit.parent / 'memory.stat').read_text"): KERNEL,
    ("lm.devices", "limit.read_text"): KERNEL,
    ("lm.devices", "meminfo.read_text"): KERNEL,
    ("lm.devices", "used.read_text"): KERNEL,
    ("lm.execution.disk_store", "open"): "it is given a descriptor",
    ("lm.execution.disk_store", "own.open"): "`OwnDirectory.open`",
    ("lm.execution.disk_store", "own.write_text"): "`OwnDirectory.write_text`",
    ("lm.execution.peer_link", "memory.open"): NO_FILE,
    ("lm.grammar.trial", "Path('/proc/self/statm').read_text"): KERNEL,
    ("lm.kernels.collectives.copied_sum", "memory.open"): NO_FILE,
    ("lm.kernels.collectives.symmetric", "memory.open"): NO_FILE,
    ("lm.kernels.collectives.symmetric", "sums.open"): NO_FILE,
    ("lm.kernels.compilation", "note.touch"): "it writes nothing, in Triton's own cache",
    ("engine.ledger", "Path(path).open"): "`make_ledger` made it, and only this user may open it",
    ("lm.memory.block_pool", "(self.copies if block in self.copies.swapping_out else self._idle).touch"): NO_FILE,
    ("lm.memory.block_pool", "host.touch"): NO_FILE,
    ("lm.memory.block_pool", "self.host.touch"): NO_FILE,
    ("lm.memory.kept_rows", "self.touch"): NO_FILE,
    ("lm.memory.row_pool", "self._pool.kept.touch"): NO_FILE,
    ("lm.memory.sequence_cache", "self._pool.touch"): NO_FILE,
    ("lm.memory.hybrid_cache", "self._pool.touch"): NO_FILE,
    ("lm.memory.hybrid_cache", "self._states.touch"): NO_FILE,
    ("lm.memory.state_pool", "self.touch"): NO_FILE,
    ("lm.memory.row_pool", "self.kept.touch"): NO_FILE,
    ("lm.parts.tiers.row_tiers", "self._states.touch"): NO_FILE,
    ("lm.parts.tiers.planner", "entry.cache.touch"): NO_FILE,
    ("lm.models.draft_head", "safe_open"): CHECKED,
    ("lm.models.hf", "auto.from_pretrained"): CHECKED,
    ("lm.models.hf", "transformers.AutoConfig.from_pretrained"): CHECKED,
    ("lm.models.loader", "safe_open"): CHECKED,
    ("lm.models.peft_files", "safe_open"): CHECKED,
    ("lm.models.peft_modules", "safe_open"): CHECKED,
    ("lm.scheduler.scheduler", "entry.cache.touch"): NO_FILE,
    ("server.address", "ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain"): CHECKED,
    ("server.conversations.database", "sqlalchemy.create_engine"): CHECKED,
    ("server.jobs.message_batches", "self.files.open"): "`server.jobs.files` opens regular files alone",
    ("server.routes.jobs", "files.open"): "`server.jobs.files` opens regular files alone",
    ("server.routes.sockets", "self._sockets.open"): NO_FILE,
    ("server.run", "Store.open"): CHECKED,
    ("server.tinker.runner", "self._shared.samplers.open"): NO_FILE,
    ("server.tinker.sampling", "SamplerTable(store.database).open"): NO_FILE,
    ("server.version_files", "directory.open"): "`OwnDirectory.open`",
    ("training.data", "np.memmap"): "it is given an open file",
    ("training.framed", "np.memmap"): "it is given an open file",
    ("training.state", "partial.write_text"): OWN,
    ("training.trainer", "self._storage.open"): NO_FILE,
}
"""The reason why a call in a module may open a file in another way, or opens none, by module and call."""


def calls() -> dict[tuple[str, str], int]:
    """Module and called function of all calls in the package that open a file by a path, or might; with a line."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        opened = opening(ast.parse(path.read_text(encoding="utf-8")))
        found.update({(module, called): line for called, line in opened.items()})
    return found


def opening(tree: ast.Module) -> dict[str, int]:
    """The called functions of a module that open a file by a path, or might; with a line."""
    safe = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in SAFE_MODULES
        for alias in node.names
    }
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            called = ast.unparse(node.func)
            if (name in OPENERS and called not in safe) or called in LOADERS:
                found[called] = node.lineno
    return found


def test_files_are_opened_by_path_only_through_the_functions_for_it() -> None:
    found = calls()
    fresh = [f"holdfast.{module}, line {line}: {called}" for (module, called), line in found.items()
             if (module, called) not in REASONS]  # fmt: skip
    assert fresh == [], "use holdfast.files, or give the reason here"
    assert REASONS.keys() - found.keys() == set(), "these calls are gone"


def test_the_search_finds_each_way_to_open_a_file() -> None:
    ways = [
        "Path(p).read_text()", "path.open('wb')", "open(p, 'r')", "os.open(p, 0)", "io.open(p)", "np.memmap(path)",
        "torch.load(p)", "np.load(p)", "safe_open(path)", "Path(p).write_bytes(b'')", "Tokenizer.from_file(p)",
    ]  # fmt: skip
    assert [way for way in ways if not opening(ast.parse(way))] == []
    assert opening(ast.parse("from holdfast.files.regular import read_text\nread_text(p)")) == {}
