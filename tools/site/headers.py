"""Reads public headers: what they declare for users, with the contracts (`///`) above it.

No parser of C++: it relies on the form that `make format` and `make lint` give to our headers.
"""

import re
from dataclasses import dataclass, field

OPEN, CLOSE = "([{", ")]}"


@dataclass
class Declaration:
    kind: str  # namespace, class, struct, enum, function, alias, constant
    name: str
    code: str  # as in the header, without its body
    contract: str = ""
    members: list["Declaration"] = field(default_factory=list)


@dataclass
class Header:
    banner: str
    declarations: list[Declaration]
    includes: list[str]


def skip_literal(text: str, at: int) -> int:
    """The end of the comment, string or character that begins at `at`; `at` if there is none."""
    if text.startswith("//", at):
        end = text.find("\n", at)
        return len(text) if end < 0 else end
    if text[at] == '"' or (text[at] == "'" and not (at and text[at - 1].isalnum())):
        end = at + 1
        while text[end] != text[at]:
            end += 2 if text[end] == "\\" else 1
        return end + 1
    return at


def matching(text: str, at: int) -> int:
    """The position behind the bracket that closes the one at `at`."""
    depth = 0
    while at < len(text):
        end = skip_literal(text, at)
        if end > at:
            at = end
            continue
        depth += (text[at] in OPEN) - (text[at] in CLOSE)
        at += 1
        if depth == 0:
            return at
    return at


def end_of_declaration(text: str, start: int) -> tuple[str, str | None, int]:
    """The code of the declaration at `start` without its body, the body if it has one, and where it ends."""
    at = start
    while at < len(text):
        end = skip_literal(text, at)
        if end > at:
            at = end
        elif text[at] == ";":
            return text[start:at + 1], None, at + 1
        elif text[at] in "([":
            at = matching(text, at)
        elif text[at] == "{":
            code, close = text[start:at], matching(text, at)
            behind = re.compile(r"\s*;").match(text, close)
            if is_type(code):
                return code, text[at + 1:close - 1], behind.end() if behind else close
            if not behind and text[close:close + 1] != ",":  # else a value: `T x{};`
                return code, text[at + 1:close - 1], close
            at = close
        else:
            at += 1
    return text[start:], None, len(text)


def items(text: str):
    """(comment, code, body) of the declarations in a scope; body is None where there are no braces."""
    at, comment = 0, []
    while at < len(text):
        if blank := re.compile(r"\s+").match(text, at):
            comment = [] if blank.group(0).count("\n") > 1 else comment
            at = blank.end()
        elif text.startswith("//", at):
            end = skip_literal(text, at)
            comment.append(text[at:end].strip())
            at = end
        elif access := re.compile(r"(public|private|protected):").match(text, at):
            yield [], access.group(0), None
            at = access.end()
        else:
            code, body, at = end_of_declaration(text, at)
            if trailing := re.compile(r"[ \t]*(//[^\n]*)").match(text, at):
                comment = [*comment, trailing.group(1)]
                at = trailing.end()
            yield comment, code.strip(), body
            comment = []


def is_type(code: str) -> bool:
    return re.search(r"(^|\n|>\s*|\s)(class|struct|enum class|enum|union|namespace)\b[^()=]*$", strip_template(code)) is not None


def strip_template(code: str) -> str:
    """Without `template <...>` and the `requires` clause of it."""
    code = code.strip()
    while code.startswith("template"):
        at, depth = code.find("<"), 0
        while at < len(code):
            depth += (code[at] == "<") - (code[at] == ">" and code[at - 1] != "-")
            at += 1
            if depth == 0:
                break
        code = code[at:].strip()
        if code.startswith("requires"):
            rest = code[len("requires"):].strip()
            if rest.startswith("("):
                code = rest[matching(rest, 0):].strip()
            else:
                code = rest.split("\n", 1)[1].strip() if "\n" in rest else rest
    return code


def contract_of(comment: list[str]) -> str:
    lines = [re.sub(r"^///?<? ?", "", line) for line in comment if line.startswith("///")]
    return "\n".join(lines).strip("\n")


def without_template_arguments(code: str) -> str:
    while (shorter := re.sub(r"<[^<>]*>", "", code)) != code:
        code = shorter
    return code


def name_of_function(plain: str) -> str | None:
    match = re.search(r"((?:operator\s*(?:\(\)|\[\]|[^\s(]+))|~?[A-Za-z_]\w*)\s*\(", plain)
    while match and match.group(1) in {"noexcept", "requires", "decltype", "alignas", "explicit"}:
        match = re.compile(match.re.pattern).search(plain, match.end())
    return match.group(1) if match else None


def declared(comment: list[str], code: str, body: str | None) -> Declaration | None:
    contract = contract_of(comment)
    plain = re.sub(r"\[\[.*?\]\]\s*|\bACCELERATE_API\s+", "", strip_template(code))
    code = re.sub(r"\[\[nodiscard\]\]\s*|\bACCELERATE_API\s+", "", code).strip()
    if re.match(r"(static_assert|friend|extern|ACCELERATE_|TORCH_MODULE|struct std::)", plain) or "= delete" in plain:
        return None
    if match := re.match(r"(class|struct|enum class|enum)\s+([\w:]+(?:<[^{]*>)?)", plain):
        if body is None:
            return None  # declared only
        kind = match.group(1).replace("enum class", "enum")
        members = [] if kind == "enum" else public_members(body, kind, match.group(2))
        if kind == "enum":
            code += " {" + re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", body)).rstrip(", ") + " }"
        return Declaration(kind, match.group(2), code, contract, members)
    if match := re.match(r"using\s+(\w+)\s*=", plain):
        return Declaration("alias", match.group(1), code, contract)
    if match := re.match(r"concept\s+(\w+)", plain):
        return Declaration("concept", match.group(1), code, contract)
    if plain.startswith("using "):
        return None
    flat = plain if "operator" in plain else without_template_arguments(plain)  # std::function<void()> is no call
    if "(" not in flat or ("=" in flat.split("(")[0] and "operator" not in flat):
        match = re.search(r"(\w+)(?:\[\])?\s*(?:=|\{|;|$)", flat.rstrip(";"))
        return Declaration("constant", match.group(1), code, contract) if match else None
    name = name_of_function(flat)
    if name is None:
        return None
    if body is not None:  # without what initialises members
        code = re.sub(r"\)\s*(noexcept\s*)?:\s.*$", r") \1", code, flags=re.S).rstrip() + ";"
    return Declaration("function", name, code, contract)


def is_implied(member: Declaration, owner: str) -> bool:
    """Copies, moves and comparisons that every reader expects."""
    if "operator==(" in member.code:
        return "default" in member.code
    if member.contract or member.name not in {owner, "operator="}:
        return False
    return "= default" in member.code or re.search(rf"\((const )?{re.escape(owner)}\s*&&?", member.code) is not None


def public_members(body: str, kind: str, owner: str) -> list[Declaration]:
    public, members = kind == "struct", []
    for comment, code, inner in items(body):
        if re.fullmatch(r"(public|private|protected):.*", code):
            public = code.startswith("public")
            continue
        if not public:
            continue
        member = declared(comment, code, inner)
        if member is None or member.name.startswith("~") or member.name.startswith("_"):
            continue
        if is_implied(member, owner.split("<")[0]):
            continue
        members.append(member)
    return members


def in_scope(text: str, inside: bool = False) -> list[Declaration]:
    """What a file or, if `inside`, a namespace of ours declares. Other namespaces and `detail` have nothing for users."""
    found = []
    for comment, code, body in items(text):
        namespace = re.match(r"namespace\s+([\w:]+)", code)
        if namespace and body is not None:
            name = namespace.group(1).split("::")
            if "detail" in name or not (inside or name[0] == "accelerate"):
                continue
            below = "::".join(name if inside else name[1:])
            for declaration in in_scope(body, inside=True):
                declaration.name = f"{below}::{declaration.name}" if below else declaration.name
                found.append(declaration)
            continue
        declaration = declared(comment, code, body)
        if declaration and not declaration.name.startswith("_"):
            found.append(declaration)
    return found


def read(path: str) -> Header:
    with open(path, encoding="utf-8") as stream:
        text = stream.read()
    banner = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        banner.append(re.sub(r"^// ?", "", line))
    includes = re.findall(r'^#include [<"](accelerate/[\w/]+\.h)[">]', text, re.M)
    text = text[text.index("#pragma once"):] if "#pragma once" in text else text
    text = re.sub(r"^#(?:.*\\\n)*.*$", "", text, flags=re.M)
    return Header("\n".join(banner), in_scope(text), includes)
