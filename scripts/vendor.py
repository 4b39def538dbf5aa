"""Fetch the page's libraries again from the npm registry, by exact version and hash, into holdfast/server/page/vendor.

`python -m scripts.vendor` rewrites the files; `python -m scripts.vendor --check` fails if they differ from the
registry's. Needs npm, which only downloads: no code of a package is run. The page itself needs neither.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "holdfast" / "server" / "page" / "vendor"

LANGUAGES = (
    "markup", "css", "clike", "javascript", "typescript", "jsx", "json", "python", "bash", "c", "cpp", "csharp", "java",
    "kotlin", "go", "rust", "ruby", "php", "swift", "sql", "yaml", "toml", "ini", "diff", "docker", "makefile", "lua",
    "r", "latex", "markdown",
)  # fmt: skip
"""Names of Prism's languages. A language comes after those that it extends.

php needs markup-templating, so it is there.
"""


CMAPS = (
    "GB-EUC", "GBpc-EUC", "GBK-EUC", "GBKp-EUC", "GBK2K", "UniGB-UCS2", "UniGB-UTF16",
    "B5pc", "HKscs-B5", "ETen-B5", "ETenms-B5", "CNS-EUC", "UniCNS-UCS2", "UniCNS-UTF16",
    "83pv-RKSJ", "90ms-RKSJ", "90msp-RKSJ", "90pv-RKSJ", "Add-RKSJ", "EUC", "Ext-RKSJ", "",
    "UniJIS-UCS2", "UniJIS-UCS2-HW", "UniJIS-UTF16",
    "KSC-EUC", "KSCms-UHC", "KSCms-UHC-HW", "KSCpc-EUC", "UniKS-UCS2", "UniKS-UTF16",
)  # fmt: skip
"""Names, without the direction, of the encodings of Chinese, Japanese and Korean that PDF files need not contain.

They are those of the PDF standard, ISO 32000-1, table 118.
"""


@dataclass(frozen=True)
class Package:
    """One npm package, and the files that are made from it."""

    name: str
    version: str
    integrity: str
    make: Callable[[Mapping[str, bytes]], Mapping[str, bytes]]
    """Function from the package's files to ours, both by name."""


def marked(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The Markdown lexer, unchanged except for the reference to its source map."""
    text = b"".join(line for line in files["lib/marked.esm.js"].splitlines(True) if b"sourceMappingURL" not in line)
    return {"marked.js": text, "marked.LICENSE": files["LICENSE"]}


def prism(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The highlighter's core and languages as one module. It only tokenizes: it never touches the document."""
    names = ["core", *LANGUAGES]
    names.insert(names.index("php"), "markup-templating")
    parts = [files[f"components/prism-{name}.min.js"].strip() for name in names]
    module = b"\n".join(
        [
            b"// Prism, the parts that scripts/vendor.py lists, as one module. See prism.LICENSE.",
            b"self.Prism = { manual: true, disableWorkerMessageHandler: true };",
            *parts,
            b"export default Prism;\n",
        ]
    )
    return {"prism.js": module, "prism.LICENSE": files["LICENSE"]}


MHCHEM = (
    b"/* mhchem: Copyright (c) 2011-2015 The MathJax Consortium, (c) 2015-2018 Martin Hensel. "
    b"Apache License 2.0, which is in pdf.LICENSE. */"
)
"""Notice of the renderer of chemistry, which KaTeX's build removes."""
FONT = re.compile(rb"src:url\((fonts/[\w-]+\.woff2)\)[^;}]*")


def katex(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The renderer of formulas and of chemistry as one module, its styles, and its fonts as WOFF2.

    Two styles of MathML, which is not seen, are renamed, because the page's policy forbids attributes with styles.
    """
    renderer, count = re.subn(
        rb'\bn\.setAttribute\("style",', b'n.setAttribute("data-style",', files["dist/katex.min.js"]
    )
    if count != 2:
        raise SystemExit(f"KaTeX sets {count} attributes with styles, and 2 are known")
    module = [renderer.strip(), MHCHEM, files["dist/contrib/mhchem.min.js"].strip(), b"export default self.katex;\n"]
    made = {
        "katex.js": b"\n".join(module),
        "katex.css": FONT.sub(rb'src:url(\1) format("woff2")', files["dist/katex.min.css"]),
        "katex.LICENSE": files["LICENSE"],
    }
    fonts = {name.decode(): files[f"dist/{name.decode()}"] for name in FONT.findall(files["dist/katex.min.css"])}
    return made | fonts


def pdf(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The reader of PDF files, in the form for browsers of the last years: its interface, its parser, and encodings."""
    made = {
        "pdf.js": files["legacy/build/pdf.min.mjs"],
        "pdf_parser.js": files["legacy/build/pdf.worker.min.mjs"],
        "pdf.LICENSE": files["LICENSE"],
        "cmaps/LICENSE": files["cmaps/LICENSE"],
    }
    names = [f"{name}-{direction}".lstrip("-") for name in CMAPS for direction in "HV"]
    names += [f"Adobe-{collection}-UCS2" for collection in ("CNS1", "GB1", "Japan1", "Korea1")]
    maps = (f"cmaps/{name}.bcmap" for name in names)
    return made | {name: files[name] for name in maps if name in files}


PACKAGES = (
    Package(
        "marked",
        "18.2.1",
        "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        marked,
    ),
    Package(
        "prismjs",
        "1.30.0",
        "sha512-DEvV2ZF2r2/63V+tK8hQvrR2ZGn10srHbXviTlcv7Kpzw8jWiNTqbVgjO3IY8RxrrOUF8VPMQQFysYYYv0YZxw==",
        prism,
    ),
    Package(
        "katex",
        "0.19.1",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        katex,
    ),
    Package(
        "pdfjs-dist",
        "6.5.438",
        "sha512-vg8Pw1x+AFKy4AMDvhuWl5cOYV8d698UoEANoFFhc79hqXDnZQqnOXoxw3HG907WHOg1JYOvLhP756boddFxpA==",
        pdf,
    ),
)


def fetch(package: Package) -> dict[str, bytes]:
    """The package's files by their paths. Raises SystemExit if the archive is not the one that is pinned."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"{package.name}@{package.version}"
        subprocess.run(
            ["npm", "pack", "--ignore-scripts", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        (archive,) = Path(folder).glob("*.tgz")
        data = archive.read_bytes()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != package.integrity:
        raise SystemExit(f"{wanted} is {found}, and {package.integrity} is pinned")
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            if (opened := tar.extractfile(member)) is not None:
                files[member.name.partition("/")[2]] = opened.read()
    return files


def main() -> int:
    """Write the files, or compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch the page's libraries again.")
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    wrong = []
    for package in PACKAGES:
        for name, data in package.make(fetch(package)).items():
            path = VENDOR / name
            if check:
                if not path.exists() or path.read_bytes() != data:
                    wrong.append(name)
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
                print(f"{name}: {len(data):,} bytes of {package.name} {package.version}")
    if wrong:
        print(f"{', '.join(wrong)}: other than the registry's", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
