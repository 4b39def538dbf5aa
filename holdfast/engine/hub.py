"""Models by their id on the Hugging Face Hub: the snapshot in its cache, fetched first if it is not there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.files.regular import read_text

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The form of a model's id: its owner and its name."""
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files that a model is read from: configuration, weights, tokenizer and chat template."""
UNWANTED = ("*/*", "consolidated*")
"""Other forms of the same weights: those in subfolders, and Mistral's."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def is_id(model: str) -> bool:
    """Whether a model's name may be an id on the hub."""
    return bool(ID.fullmatch(model))


def snapshot(model: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> Path:
    """The directory of a model's snapshot: the one in the hub's cache if it is complete, else fetched into the cache.

    A cached snapshot takes no network, and is not compared with the hub's. `weights` False leaves the weights out;
    `code` includes the model's own Python files. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE count as in
    huggingface_hub. Progress goes to stderr. Raises ValueError with the reason and the way out.
    """
    # Imported here because it takes a while, and a local directory does not need it.
    from huggingface_hub import constants, try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision)
    if isinstance(config, str) and lacks(Path(config).parent, weights) is None:
        return Path(config).parent
    named = model if revision is None else f"{model} at revision {revision}"
    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            f"model {named} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; fetch it where there is a "
            f"network: {command(model, revision)}"
        )
    print(f"fetching {named} from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}", file=sys.stderr, flush=True)
    # In a process of its own, which Ctrl-C ends at once: the library's threads would continue to the end of their
    # files.
    asked = json.dumps([model, revision, weights, code])
    done = subprocess.run([sys.executable, "-P", "-m", __name__, asked], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"model {named}: {done.stdout.strip() or f'fetching it ended with {done.returncode}'}")
    fetched = Path(done.stdout.strip())
    if (missing := lacks(fetched, weights)) is not None:
        raise ValueError(f"model {named} on {constants.ENDPOINT} has no {missing}; only safetensors are served")
    return fetched


def main() -> None:
    """Fetch the model that the argument names. Prints the snapshot's directory, or the fault with exit status 1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    model, revision, weights, code = json.loads(sys.argv[1])
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = constants.ENDPOINT
    wanted = [each for each in WANTED if weights or each != "*.safetensors"] + ["*.py"] * code
    login = "log in (hf auth login) or set HF_TOKEN"
    try:
        print(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=[*UNWANTED]))
        return
    except GatedRepoError:
        reason = f"it is gated: accept its terms at {endpoint}/{model}, then {login}"
    except RepositoryNotFoundError:
        reason = f"there is no such directory, and {endpoint} shows no such model; for a private one, {login}"
    except RevisionNotFoundError:
        reason = f"{endpoint} has no such revision of it"
    except HfHubHTTPError as error:
        reason = f"{endpoint} answered: {first_line(error)}"
    except Exception as error:  # the library and its HTTP client have many error types for no network
        reason = (
            f"it is not in {constants.HF_HUB_CACHE}, and {endpoint} cannot be reached ({first_line(error)}); fetch it "
            f"where there is a network: {command(model, revision)}"
        )
    print(reason)
    sys.exit(1)


def command(model: str, revision: str | None) -> str:
    """The shell command that fetches a model into the cache."""
    return f"hf download {model}" + (f" --revision {revision}" if revision else "")


def lacks(directory: Path, weights: bool) -> str | None:
    """The first file that a snapshot lacks; None if it is complete."""
    names = ["config.json"]
    if weights and not (directory / SINGLE).is_file():
        names.append(INDEX)
        try:
            names += sorted({str(name) for name in json.loads(read_text(directory / INDEX))["weight_map"].values()})
        except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError):
            names.append(SINGLE)
    return next((name for name in names if not (directory / name).is_file()), None)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    main()
