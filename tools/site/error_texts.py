"""The texts of the errors that the library and its commands raise, read from the sources.

An error is `throw SomeError(...)`, or a call of a function that throws one with its own text, such as `refuse(...)`. Of
the arguments the string literals are kept; what is inserted at run time becomes an ellipsis.
"""

import re
import subprocess
from dataclasses import dataclass

KINDS = {
    "ConfigError", "ArgumentError", "StateError", "CommError", "CheckpointError", "FormatError",
    "StateDictMismatch", "UnsupportedError", "DistributedOperationException",
}
# Functions that throw with a reason they are given, by the kind of error.
RAISING = {"format_error": "FormatError", "refuse": None, "refuse_at": None, "refuse_content": "CheckpointError"}
CALL = re.compile(r"\b(?:throw\s+(?:[a-z_]+::)*(\w+)|(" + "|".join(RAISING) + r"))\s*\(")
# `str(...)` joins its arguments: it is no value of its own.
TOKEN = re.compile(r'(?:detail::)?\bstr(?=\()|"((?:[^"\\\n]|\\.)*)"|R"\((.*?)\)"|//[^\n]*|\'(?:[^\'\\]|\\.)+\'|[()]|\s+|.', re.S)
ELLIPSIS = "…"
BREAK = "\0"  # between arguments


@dataclass(frozen=True)
class ErrorText:
    file: str
    line: int
    kind: str  # empty: a part of an error whose kind the caller decides
    text: str


def literal(text: str) -> str:
    return (text.replace(r"\"", '"').replace(r"\n", " ").replace(r"\t", " ").replace(r"\\", "\\")
            .replace(r"\u2019", "’"))


def arguments_as_text(source: str, start: int) -> str:
    """The literals of a call whose opening parenthesis is before `start`, ellipses between them."""
    depth, parts = 1, []
    for token in TOKEN.finditer(source, start):
        word = token.group(0)
        if word == "(":
            depth += 1
        elif word == ")":
            depth -= 1
            if depth == 0:
                break
        elif word == "," and depth == 1:
            parts.append(BREAK)
        elif token.group(1) is not None or token.group(2) is not None:
            parts.append(literal(token.group(1) if token.group(1) is not None else token.group(2)))
        elif not word.isspace() and not word.startswith("//") and word not in (",", "&", "*", "str", "detail::str"):
            if not parts or parts[-1] != ELLIPSIS:
                parts.append(ELLIPSIS)
    # Arguments that are no text, such as a path for the handler, do not belong to the message.
    arguments = [argument for argument in "".join(parts).split(BREAK) if re.search(r"[A-Za-z]", argument)]
    text = re.sub(rf"{ELLIPSIS}( ?{ELLIPSIS})+", ELLIPSIS, " / ".join(arguments))
    return re.sub(r"\s+", " ", text).strip()


def source_files() -> list[str]:
    folders = ["src", "include", "cli", "cuda"]
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders],
                            check=True, capture_output=True, text=True).stdout.split()
    return sorted(file for file in listed if file.endswith((".cpp", ".h")))


def errors_in(file: str) -> list[ErrorText]:
    with open(file, encoding="utf-8") as stream:
        source = stream.read()
    found = []
    for call in CALL.finditer(source):
        kind = call.group(1) if call.group(1) in KINDS else RAISING.get(call.group(2) or call.group(1), "none")
        if kind == "none":
            continue
        text = arguments_as_text(source, call.end())
        # The declaration of such a function, or an error whose text was made elsewhere, has no words.
        if len(re.findall(r"[A-Za-z]{2,}", text)) < 2:
            continue
        found.append(ErrorText(file, source.count("\n", 0, call.start()) + 1, kind or "", text))
    return found


def all_errors() -> list[ErrorText]:
    return [error for file in source_files() for error in errors_in(file)]
