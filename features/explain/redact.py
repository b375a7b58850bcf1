"""Replaces what identifies people and machines in a text by numbered names.

The same value has the same name everywhere, so that the text still reads.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_SECRET_NAMES = "token|api[_-]?key|secret|passw(?:or)?d|credential|authorization|bearer"
# Kinds of what is replaced, in this order: what an earlier pattern has replaced, a
# later one does not see. The group `value` is replaced, else all of the match.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "SECRET": (
        r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|wandb_v1_)[\w-]{16,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,}",
        r"\b[0-9a-f]{40}\b",
        rf"(?i)\b[\w-]*(?:{_SECRET_NAMES})[\w-]*['\"]?\s*[=:]\s*['\"]?"
        r"(?:Bearer\s+)?(?P<value>[^\s'\",;]{6,})",
        r"(?<=://)(?P<value>[^\s/:@]+:[^\s/@]+)(?=@)",
        r"-----BEGIN [A-Z ]+-----[\s\S]*?-----END [A-Z ]+-----",
    ),
    "MAIL": (r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b",),
    "USER": (
        r"(?:/home/|/Users/|/scratch/users?/|[A-Za-z]:\\Users\\)(?P<value>[\w.-]+)",
        r"(?m)^(?P<value>[a-z_][\w-]*)(?=@[\w.-]+[:$#])",
        r"(?i)\b(?:USER|USERNAME|LOGNAME)=(?P<value>[\w.-]+)",
    ),
    "HOST": (
        r"(?<=://)(?P<value>[\w.-]+\.\w+|localhost)(?=[:/]|\s|$)",
        r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
        r"\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b",
        r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b",
        r"(?i)\b(?:host(?:name)?|node|master_addr|nodelist)['\"]?\s*[=:]\s*['\"]?"
        r"(?P<value>[A-Za-z][\w.-]+)",
        r"(?m)^\[?(?P<value>[A-Za-z][\w-]*\d[\w-]*(?:\.[\w-]+)*)(?=:\d+(?::\d+)? \[)",
        r"@(?P<value>[A-Za-z][\w.-]+)(?=[:$#])",
        r"\b[\w-]+(?:\.[\w-]+)*\.(?:local|internal|lan|corp|cluster)\b",
    ),
    "PATH": (
        r"(?<![\w.:/])(?P<value>(?:/[\w.@+-]+){2,})(?=/[\w.@+-]+)",
        r"\b(?P<value>[A-Za-z]:(?:\\[\w.@+ -]+){2,})(?=\\[\w.@+ -]+)",
    ),
}
_COMPILED = {
    kind: [re.compile(pattern) for pattern in patterns]
    for kind, patterns in _PATTERNS.items()
}
# What makes a message readable, and names nobody.
_KEPT = re.compile(
    r"^(SECRET|MAIL|USER|HOST|PATH)\d+$|^(localhost|127\.0\.0\.1|0\.0\.0\.0)$"
)
_PACKAGES = re.compile(r"^.*(?=/(?:site|dist)-packages)")
_PUBLIC_HOSTS = ("pytorch.org", "github.com", "huggingface.co", "nvidia.com")


@dataclass
class _Names:
    """Names that replace values, of one kind each."""

    by_value: dict[tuple[str, str], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def name(self, kind: str, value: str) -> str:
        key = (kind, value)
        if key not in self.by_value:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.by_value[key] = f"{kind}{self.counts[kind]}"
        return self.by_value[key]


def redacted(text: str) -> str:
    """Return a text without hosts, paths, user names, mail addresses and secrets."""
    names = _Names()
    for kind, patterns in _COMPILED.items():
        for pattern in patterns:
            text = pattern.sub(_replacer(kind, names), text)
    return text


def _replacer(kind: str, names: _Names) -> Callable[[re.Match[str]], str]:
    def replace(match: re.Match[str]) -> str:
        whole = match[0]
        has_value = "value" in match.re.groupindex
        value = match["value"] if has_value else whole
        if _KEPT.match(value) or (kind == "HOST" and _is_public(value)):
            return whole
        secret = value
        if kind == "PATH" and (packages := _PACKAGES.match(value)):
            # Which file of which package says where a program was.
            secret = packages[0]
        start = match.start("value") - match.start() if has_value else 0
        ending = whole[start + len(secret) :]
        return whole[:start] + _shown(kind, names.name(kind, secret)) + ending

    return replace


def _shown(kind: str, name: str) -> str:
    return f"/{name}" if kind == "PATH" else name


def _is_public(host: str) -> bool:
    return host.endswith(_PUBLIC_HOSTS)
