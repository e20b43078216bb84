"""Text and tokens, as lab/model's tokenizer and template and lab/api's reader of tool calls have them."""

import codecs
import json
import re

PADDING, BEGIN, END, TOOLS, SYSTEM, USER, ASSISTANT, TOOL = range(8)
FIRST_BYTE = 8
FIRST_MARKUP = FIRST_BYTE + 256
CONTROL = [
    "<｜pad｜>",
    "<｜begin｜>",
    "<｜end｜>",
    "<｜Tools｜>",
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜Tool｜>",
]

OPEN_CALLS, CLOSE_CALLS = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
OPEN_INVOKE, CLOSE_INVOKE = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
OPEN_PARAMETER, CLOSE_PARAMETER = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"
END_NAME, END_STRING_NAME, END_JSON_NAME = '">\n', '" string="true">', '" string="false">'
MARKUP = [
    OPEN_CALLS + "\n", CLOSE_CALLS, OPEN_INVOKE, CLOSE_INVOKE + "\n", OPEN_PARAMETER, CLOSE_PARAMETER + "\n",
    END_NAME, END_STRING_NAME, END_JSON_NAME,
]  # fmt: skip

WORD = re.compile(rb"[A-Za-z0-9_]+")


class Bad(Exception):
    """What a client asked for can't be done."""


class Tokenizer:
    """Words and other entries, each a token; what has none is spelled in bytes.

    One space between two runs of word bytes is left out if at least one is an entry's, and decoding puts it back.
    """

    def __init__(self, path):
        with open(path, encoding="utf-8") as f:
            entries = json.load(f)
        self.text = [t.encode() for t in CONTROL] + [bytes([b]) for b in range(256)]
        self.words, self.signs = {}, {}
        for entry in MARKUP + entries:
            token, data = len(self.text), entry.encode()
            self.text.append(data)
            if WORD.match(data):
                self.words[data] = token
            else:
                self.signs.setdefault(data[0], []).append(token)
        for tokens in self.signs.values():
            tokens.sort(key=lambda t: -len(self.text[t]))

    def encode(self, text):
        data, tokens, previous, i = text.encode(), [], PADDING, 0
        while i < len(data):
            token, length = self._at(data, i)
            if token == FIRST_BYTE + ord(" ") and self._space(previous, self._at(data, i + 1)[0]):
                i += 1
                continue
            if self._is_byte(token):
                tokens.extend(FIRST_BYTE + b for b in data[i : i + length])
            else:
                tokens.append(token)
            previous = tokens[-1]
            i += length
        return tokens

    def added(self, previous, token):
        """The bytes that a token adds after the token previous."""
        return (b" " if self._space(previous, token) else b"") + self.text[token]

    def _at(self, data, i):
        """What data has at i: an entry's token or its first byte's, and the length."""
        if i >= len(data):
            return PADDING, 0
        if run := WORD.match(data, i):
            return self.words.get(run.group(), FIRST_BYTE + data[i]), len(run.group())
        for token in self.signs.get(data[i], ()):
            entry, end = self.text[token], i + len(self.text[token])
            cuts = WORD.match(entry, len(entry) - 1) and WORD.match(data, end)
            if data.startswith(entry, i) and not cuts:
                return token, len(entry)
        return FIRST_BYTE + data[i], 1

    def _space(self, a, b):
        left, right = self.text[a], self.text[b]
        return bool(
            WORD.match(left, len(left) - 1) and WORD.match(right) and not (self._is_byte(a) and self._is_byte(b))
        )

    @staticmethod
    def _is_byte(token):
        return FIRST_BYTE <= token < FIRST_MARKUP


def prompt(tokenizer, messages, tools):
    """A conversation's tokens, with the assistant's turn opened."""
    tokens = [BEGIN]
    if tools:
        lines = []
        for tool in tools:
            function = tool["function"]
            names = (function.get("parameters") or {}).get("properties") or {}
            lines.append(f"{function['name']}({' '.join(names)})\n")
        tokens += [TOOLS, *tokenizer.encode("".join(lines))]
    roles = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "tool": TOOL}
    for i, message in enumerate(messages):
        role = message.get("role")
        if role == "assistant":
            tokens += [ASSISTANT, *tokenizer.encode(assistant(message)), END]
        elif role in roles:
            tokens += [roles[role], *tokenizer.encode(content(message))]
        else:
            raise Bad(f"messages[{i}]: role {role!r} is not one of system, developer, user, assistant, tool")
    return [*tokens, ASSISTANT]


def content(message):
    text = message.get("content") or ""
    if isinstance(text, list):
        return "".join(part.get("text", "") for part in text)
    return text


def assistant(message):
    """An assistant's turn as the model writes it."""
    calls = message.get("tool_calls")
    if not calls:
        return content(message)
    text = content(message)
    parts = [f"{text}\n\n" if text else "", OPEN_CALLS, "\n"]
    for call in calls:
        function = call["function"]
        parts += [OPEN_INVOKE, function["name"], END_NAME]
        try:
            arguments = json.loads(function["arguments"])
        except json.JSONDecodeError:
            arguments = None
        if isinstance(arguments, dict):
            for name, value in arguments.items():
                is_text = isinstance(value, str)
                written = value if is_text else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                parts += [OPEN_PARAMETER, name, END_STRING_NAME if is_text else END_JSON_NAME, written]
                parts += [CLOSE_PARAMETER, "\n"]
        else:
            parts.append(function["arguments"])
        parts += [CLOSE_INVOKE, "\n"]
    return "".join(parts) + CLOSE_CALLS


INVOKE = re.compile(rf'\s*{OPEN_INVOKE}([^"<>\n]{{1,256}})">\s*((?:(?!</?｜DSML｜invoke).)*){CLOSE_INVOKE}', re.DOTALL)
PARAMETER = re.compile(
    rf'{OPEN_PARAMETER}([^"<>\n]{{1,256}})" string="(true|false)">((?:(?!</?｜DSML｜).)*){CLOSE_PARAMETER}\s*',
    re.DOTALL,
)


class Reply:
    """Turns a reply's tokens into text and calls. Text goes out at once, calls when the reply has ended.

    What is no call is text, markup and all. With calls=False everything is text.
    """

    def __init__(self, tokenizer, previous, calls):
        self.tokenizer, self.previous, self.calls = tokenizer, previous, calls
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held = ""

    def push(self, token):
        """The text that is certain, once the token has come."""
        self.held += self.decoder.decode(self.tokenizer.added(self.previous, token))
        self.previous = token
        if not self.calls:
            text, self.held = self.held, ""
            return text
        at = self._markup()
        text, self.held = self.held[:at], self.held[at:]
        return text

    def close(self):
        """What was held back: text, and calls as (name, arguments)."""
        rest = self.held + self.decoder.decode(b"", final=True)
        self.held = ""
        if not self.calls:
            return rest, []
        before, opened, after = rest.partition(OPEN_CALLS)
        calls, at = [], 0
        while opened and (found := INVOKE.match(after, at)):
            arguments = read_arguments(found[2])
            if arguments is None:
                break
            calls.append((found[1], arguments))
            at = found.end()
        if not calls:
            return rest, []
        return before.removesuffix("\n\n") + after[at:].strip().removeprefix(CLOSE_CALLS), calls

    def _markup(self):
        """Where markup begins in what is held, or may begin."""
        for opening in ("\n\n" + OPEN_CALLS, OPEN_CALLS):
            if (at := self.held.find(opening)) >= 0:
                return at
        at = len(self.held)
        for opening in ("\n\n" + OPEN_CALLS, OPEN_CALLS):
            longest = min(len(self.held), len(opening) - 1)
            part = next((n for n in range(longest, 0, -1) if self.held.endswith(opening[:n])), 0)
            at = min(at, len(self.held) - part)
        return at


def read_arguments(markup):
    """The arguments of a call as JSON; None if the markup isn't a call's."""
    if markup.startswith("{"):
        try:
            return markup.strip() if isinstance(json.loads(markup), dict) else None
        except json.JSONDecodeError:
            return None
    members, at = [], 0
    while found := PARAMETER.match(markup, at):
        name, kind, value = found.groups()
        if kind == "true" or not is_json(value):
            value = json.dumps(value, ensure_ascii=False)
        members.append(f"{json.dumps(name, ensure_ascii=False)}:{value.strip()}")
        at = found.end()
    return "{" + ",".join(members) + "}" if at == len(markup) else None


def is_json(text):
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True
