"""Filters a list of URLs, one per line: leaves out repeats, and URLs that cannot lead to a page of English prose.

Left out are, with these reasons in the dropped list: `short` (8 characters or fewer), `malformed`, `extension` (files of
pictures, sound, archives, ..., judged with the query cut off), `domain` (registered domains of pictures, video, social
networks, shops, short links and Wikipedia, which GPT-2's WebText leaves out as well), `repeat` (the same URL as an earlier
line).

    python -m data_tools filter_urls --input urls/*.txt --output urls.filtered.txt
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any
from urllib.parse import urlsplit

from data_tools.blacklists import DOMAINS, EXTENSIONS
from data_tools.inputs import URL_FORMATS
from data_tools.line_functions import Dropped, Kept
from data_tools.optional import require
from data_tools.options import add_input_output, add_run_options, run_options
from data_tools.repeats import corpus_key, repeated_lines
from data_tools.shard_plan import shards_of
from data_tools.shards import no_search, run_lines
from megazero.lines.jsonl import decoded
from megazero.texts import read_text

SHORTEST = 9
_HOST = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))+\.?")
# Most URLs look like this, and need no urlsplit: host, path, and what is cut off.
_SIMPLE = re.compile(
    r"https?://([A-Za-z0-9.-]+)(/[^\s\x00-\x1f\x7f<>\"\\^`{|}?#]*)?([?#][^\s\x00-\x1f\x7f<>\"\\^`{|}]*)?"
)
_HOSTS_KNOWN = 1 << 16  # most URLs are of few hosts
_FORBIDDEN = re.compile(r"[\s\x00-\x1f\x7f<>\"\\^`{|}]")


class UrlFilter:
    """A line function: keeps the URL of a line.

    Args:
        domains: registered domains ("example.co.uk"), in ASCII, to leave out.
        extensions: endings of file names to leave out, with their dot, in lower case.
    """

    def __init__(self, domains: frozenset[str], extensions: frozenset[str]) -> None:
        self.domains, self.extensions = domains, extensions

    def __call__(self, line: bytes) -> Kept:
        """Raises LineError for a line that is not UTF-8, and Dropped for an unwanted URL."""
        url = decoded(line).strip()
        if len(url) < SHORTEST:
            raise Dropped("short", url)
        host, path = _host_and_path(url)
        _, dot, ending = path.rpartition("/")[2].rpartition(".")
        extension = dot + ending.lower()
        if dot and extension in self.extensions:
            raise Dropped("extension", url, extension)
        domain = _registered_domain(host)
        if domain in self.domains:
            raise Dropped("domain", url, domain)
        return Kept(url.encode() + b"\n")

    def identify(self, line: bytes) -> str:
        """The URL of a line that is valid UTF-8."""
        return line.decode("utf-8").strip()


@cache
def _suffixes() -> Callable[[str], Any]:
    """What divides a host, by the list of public suffixes inside the package: nothing is downloaded, nothing cached outside."""
    return require("tldextract", "the step filter_urls").TLDExtract(suffix_list_urls=(), cache_dir=None)


@lru_cache(_HOSTS_KNOWN)
def _registered_domain(host: str) -> str:
    name = _in_ascii(host)[0]
    parts = _suffixes()(name)
    return f"{parts.domain}.{parts.suffix}" if parts.domain and parts.suffix else name


def _host_and_path(url: str) -> tuple[str, str]:
    """Host in lower case, and path without query and fragment; raises Dropped for a malformed URL."""
    if simple := _SIMPLE.fullmatch(url):
        host, path = simple[1].lower().rstrip("."), simple[2] or ""
    else:
        host, path = _split(url)
    fault = _in_ascii(host)[1]
    if fault is not None:
        raise Dropped("malformed", url, fault)
    return host, path


def _split(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        _ = parts.port  # raises where it is not a number
    except ValueError as error:
        raise Dropped("malformed", url, str(error)) from error
    if parts.scheme not in ("http", "https"):
        raise Dropped("malformed", url, "neither http nor https")
    if _FORBIDDEN.search(url):
        raise Dropped("malformed", url, "a character that no URL has")
    return host, parts.path


@lru_cache(_HOSTS_KNOWN)
def _in_ascii(host: str) -> tuple[str, str | None]:
    """A host as networks spell it, xn--bcher-kva.example for bücher.example, and what is wrong with it; None for nothing."""
    if ":" in host:
        return host, None  # an address, which urlsplit has checked
    try:
        name = host.encode("idna").decode()
    except UnicodeError as error:
        return host, f"host: {error}"
    return name, None if _HOST.fullmatch(name) else "no valid host"


def url_digest(line: bytes) -> bytes | None:
    """What must not repeat in a list of URLs: the line without white space around it; None for blank lines and bad UTF-8."""
    try:
        return line.decode("utf-8").strip().encode() or None
    except UnicodeDecodeError:
        return None


def _read_list(path: str, flag: str, form: Callable[[str], str]) -> frozenset[str]:
    """The entries of a list.

    Args:
        form: how a URL would be found that has the entry.

    Raises:
        ValueError: the file is not UTF-8, or no URL can have an entry, because its form is another.
    """
    lines = (line.split("#")[0].strip().lower() for line in read_text(path, flag).splitlines())
    entries = frozenset(line for line in lines if line)
    for entry in sorted(entries):
        if (found := form(entry)) != entry:
            raise ValueError(f"{flag} {path}: no URL is found by the entry {entry}: write {found}")
    return entries


def _extension(entry: str) -> str:
    return "." + entry.rpartition(".")[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the step."""
    output = "a file (.txt, .txt.gz, .txt.zst), or a folder for one per input"
    add_input_output(parser, output, "files or folders: .txt (.gz, .xz, .zst), one URL on a line", URL_FORMATS)
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--domains", metavar="FILE", help="registered domains to leave out, in place of the built-in ones"
    )
    rules.add_argument(
        "--extensions", metavar="FILE", help="endings to leave out (.png), in place of the built-in ones"
    )
    rules.add_argument("--keep-repeats", action="store_true", help="do not look for repeated URLs")
    add_run_options(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Filters, and returns the statistics."""
    tldextract = require("tldextract", "the step filter_urls")
    options = run_options(args)
    domains = _read_list(args.domains, "--domains", _registered_domain) if args.domains else DOMAINS
    extensions = _read_list(args.extensions, "--extensions", _extension) if args.extensions else EXTENSIONS
    inputs, shards = shards_of(args, URL_FORMATS)
    settings = {
        "domains": sorted(domains),
        "extensions": sorted(extensions),
        "keep_repeats": args.keep_repeats,
        "tldextract": tldextract.__version__,
        "corpus": None if args.keep_repeats else corpus_key(inputs, options),
    }
    search = partial(repeated_lines, "filter_urls", shards, url_digest, "repeat", options)
    url_filter = UrlFilter(domains, extensions)
    return run_lines("filter_urls", shards, url_filter, settings, options, no_search if args.keep_repeats else search)
