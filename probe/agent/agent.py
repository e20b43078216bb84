"""The part of culprit's probes that lives in the server's own process.

A probe is one or more counters at one statement of one function. The server's
own interpreter compiles the deployed file twice, as it is and with the counting
statements put in, and the function gets the second code object if the first
equals the one that is live. Taking the probe out gives the function its first
code object back: the same object, not an equal one.

The counters are in a mapped file, one for each process; docs/probes.md has the
layout. Nothing here may ever raise into the server.

Standard library only; CPython 3.11 and newer.
"""

import ast
import builtins
import contextlib
import dis
import functools
import gc
import hashlib
import io
import json
import mmap
import os
import re
import struct
import sys
import threading
import time
import tokenize
import types
import warnings

# The layout of the counter file. docs/probes.md and counters.go have it too.
FILE_SIZE = 65536
HEADER_SIZE = 256
SLOTS = 2048
META = HEADER_SIZE + 8 * SLOTS
STRINGS = META + 16 * SLOTS
STRINGS_SIZE = FILE_SIZE - STRINGS

# Places of 64-bit words in the header, and values of its state.
STATE, GENERATION, USED, STRINGS_USED = 13, 14, 15, 19
AGENT_ERRORS, TEST_WANT, TEST_GOT, PICOSECONDS, ARMED_AT, DISARMED_AT = 20, 21, 22, 23, 24, 25
BUILDING, ARMED, DETACHED, REFUSED = 0, 1, 2, 3
GIL_BUILD, LAUNCHED, ATTACHED, FORKED = 1, 2, 4, 8

# Kinds of slots.
ENTRY, HIT, MATCH, LABEL, EXPR_ERROR, OVERFLOW, TYPE_ERROR, CAPTURE, SELF_TEST = range(9)
VALID = 1  # in a slot's flags, stored last

TEST_HITS, TEST_MATCHES = 640, 630
MAX_LABEL_CHARS = 256
MAX_ERRORS = 100  # of a probe's expressions: then it is no longer used
MAIN_WAIT_S = 60  # for the file that runs as __main__ to come to its functions
MAX_KINDS = 8  # of values that are no label, told apart by their type


class Refusal(Exception):
    """Why a probe isn't placed. The server goes on as if it weren't there."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Hold:
    """What probed code counts in: m[slot] += 1.

    A memoryview itself can't be a constant of a code object, since it can't be
    hashed; and a forked child gives m its own file without finding the code.
    Between the load and the store of m[i] += 1 the interpreter never switches
    threads, so no count is lost, as long as nothing is called in between.
    """

    __slots__ = ("m",)


def nowhere():
    """Counters that nobody reads."""
    return memoryview(bytearray(8 * SLOTS)).cast("Q")


HOLD = Hold()
HOLD.m = nowhere()


class Counters:
    """One process's counter file."""

    def __init__(self, directory, pack_sha256, flags):
        self.pid = os.getpid()
        with open("/proc/self/stat", "rb") as f:
            stat = f.read()
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.ticks, parent = int(fields[19]), int(fields[1])
        self.name = f"{self.pid}-{self.ticks}"
        self.path = os.path.join(directory, self.name + ".ctr")
        # An older file of this process is never cut: a suspended call may count
        # in it, and a page that is gone is a SIGBUS.
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Reserved now: a page that can't be had later would be a SIGBUS in the server.
            os.posix_fallocate(fd, 0, FILE_SIZE)
            self.map = mmap.mmap(fd, FILE_SIZE)
        except OSError as e:
            os.close(fd)
            os.unlink(self.path)
            raise Refusal(
                "E_SHM",
                f"cannot reserve {FILE_SIZE // 1024} KiB in {directory} of PID {self.pid} ({e.strerror}). Not attached: "
                "a mapped file on a full tmpfs would kill the server with SIGBUS.",
            ) from None
        os.close(fd)
        with memoryview(self.map) as view, view[:HEADER_SIZE] as header, view[HEADER_SIZE:META] as slots:
            self.header, self.slots = header.cast("Q"), slots.cast("Q")
            self.meta, self.strings = view[META:STRINGS], view[STRINGS:]
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
        except OSError:
            namespace = 0
        if not hasattr(sys, "_is_gil_enabled") or sys._is_gil_enabled():
            flags |= GIL_BUILD
        struct.pack_into("<8sIIII", self.map, 0, b"CULPRIT1", 1, HEADER_SIZE, FILE_SIZE, flags)
        struct.pack_into(
            "<QQQQQQ32s", self.map, 24, self.pid, self.ticks, namespace, parent, time.time_ns(), time.monotonic_ns(), bytes.fromhex(pack_sha256)
        )
        self.header[16], self.header[17], self.header[18] = HEADER_SIZE, META, STRINGS
        self.used = 0
        self.lock = threading.Lock()

    def slot(self, probe, kind, text=b""):
        """Takes a slot; None when the file is full."""
        # A signal handler that comes in the middle would wait for itself.
        if not self.lock.acquire(timeout=0.05):
            return None
        try:
            offset, slot = self.header[STRINGS_USED], self.used
            if slot >= SLOTS or offset + len(text) > STRINGS_SIZE:
                return None
            self.header[GENERATION] += 1
            self.strings[offset : offset + len(text)] = text
            struct.pack_into("<HBBIII", self.meta, 16 * slot, probe, kind, VALID, offset, len(text), 0)
            self.header[STRINGS_USED] = offset + len(text)
            self.used = slot + 1
            self.header[USED] = self.used
            self.header[GENERATION] += 1
            return slot
        finally:
            self.lock.release()

    def close(self):
        """Takes the file out of memory; its counts stay where they are."""
        for view in (self.header, self.slots, self.meta, self.strings):
            view.release()
        self.map.close()

    def copy_table(self, other):
        """Takes over the slots of a parent process, all at zero."""
        self.meta[:], self.strings[:] = other.meta, other.strings
        for word in (USED, STRINGS_USED, TEST_WANT, TEST_GOT, PICOSECONDS, ARMED_AT):
            self.header[word] = other.header[word]
        self.used = other.used


class Labels:
    """Counts by label values. A constant of probed code."""

    __slots__ = ("table", "limit", "probe", "overflow", "bad", "kinds")

    def __init__(self, probe, limit, overflow, bad):
        self.table, self.limit, self.probe, self.overflow, self.bad = {}, limit, probe, overflow, bad
        self.kinds = {}  # slots of values that are no label, by place and type

    def add(self, values):
        try:
            slot = self.table[values]
        except (KeyError, TypeError):
            slot = self.new(values)
        HOLD.m[slot] += 1

    def new(self, values):
        for i, v in enumerate(values):
            if type(v) not in (str, int, bool, type(None)):
                return self.no_label(i, type(v).__name__)
            if type(v) is str and len(v) > MAX_LABEL_CHARS:
                return self.no_label(i, f"str of more than {MAX_LABEL_CHARS} characters")
        if len(self.table) >= self.limit:
            return self.overflow
        text = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
        slot = AGENT.counters.slot(self.probe, LABEL, text)
        if slot is None:
            return self.overflow
        return self.table.setdefault(values, slot)

    def no_label(self, place, kind):
        slot = self.kinds.get((place, kind))
        if slot is None and len(self.kinds) < MAX_KINDS:
            slot = AGENT.counters.slot(self.probe, TYPE_ERROR, json.dumps([place, kind]).encode())
        if slot is None:
            return self.bad
        return self.kinds.setdefault((place, kind), slot)


class Fuse:
    """Takes a probe out of use whose expressions raise again and again: each
    raise costs the server microseconds. A constant of probed code."""

    __slots__ = ("on", "probe", "errors", "told")

    def __init__(self, probe, errors):
        self.on, self.probe, self.errors, self.told = True, probe, errors, False

    def failed(self):
        """An expression has just raised, and was counted."""
        try:
            if not self.told:
                self.told, e = True, sys.exception()
                AGENT.counters.slot(self.probe, EXPR_ERROR, f"{type(e).__name__}: {e}"[:MAX_LABEL_CHARS].encode("utf-8", "replace"))
            if HOLD.m[self.errors] > MAX_ERRORS:
                self.on = False
        except Exception:
            self.on = False


class Capturing:
    """Says whether a CUDA graph is being captured. A constant of probed code."""

    __slots__ = ()

    def now(self):
        torch = sys.modules.get("torch")
        try:
            return torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        except Exception:
            return False


# ---------------------------------------------------------------------------
# Source: where a probe goes.


def fold(text):
    return " ".join(text.split())


class Source:
    """A parsed file."""

    def __init__(self, data, name):
        self.name = name
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.data = data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(data, name)
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        self.lines = io.TextIOWrapper(io.BytesIO(data), encoding, "replace").read().split("\n")
        self.functions = {}  # by qualified name: function nodes, with the functions around them
        self._index(self.tree, "", ())

    def _index(self, node, prefix, around):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name = prefix + child.name
                if not any(_last_name(d) == "overload" for d in child.decorator_list):
                    self.functions.setdefault(name, []).append((child, around))
                self._index(child, name + ".<locals>.", around + (child,))
            elif isinstance(child, ast.ClassDef):
                self._index(child, prefix + child.name + ".", around)
            else:
                self._index(child, prefix, around)

    def first_line(self, stmt):
        """The first line of a statement without its comment."""
        line = self.lines[stmt.lineno - 1]
        # Columns are in UTF-8 bytes.
        start = len(line.encode()[: stmt.col_offset].decode("utf-8", "replace"))
        text = line[start:]
        if stmt.end_lineno == stmt.lineno:
            return fold(line.encode()[stmt.col_offset : stmt.end_col_offset].decode("utf-8", "replace"))
        if "#" in text:
            try:
                for token in tokenize.generate_tokens(iter([text]).__next__):
                    if token.type == tokenize.COMMENT:
                        text = text[: token.start[1]]
            except (tokenize.TokenError, SyntaxError, StopIteration):
                pass
        return fold(text)

    def function(self, qualname):
        found = self.functions.get(qualname)
        if not found:
            last = qualname.rpartition(".")[2]
            similar = [n for n in self.functions if n.rpartition(".")[2] == last] or _nearest(qualname, self.functions)
            message = f"no function {qualname} in {os.path.basename(self.name)}"
            if similar:
                message += "; similar: " + ", ".join(similar[:4])
            raise Refusal("E_FUNC", message)
        return found

    def place(self, probe):
        """Finds the function's node, those around it, and the statement, or
        None for the function's beginning."""
        candidates = self.function(probe["function"])
        file = os.path.basename(self.name)
        anchor = probe.get("anchor")
        if not anchor:
            if len(candidates) > 1:
                lines = ", ".join(str(n.lineno) for n, _ in candidates)
                raise Refusal("E_ANCHOR_MANY", f"{probe['function']} is defined {len(candidates)} times ({file}, lines {lines}). Give an anchor in the one that is meant.")
            return candidates[0] + (None,)
        want = fold(anchor)
        matches, all_texts = [], []
        for node, around in candidates:
            statements = list(own_statements(node))
            texts = [self.first_line(s) for s in statements]
            all_texts += zip(texts, (s.lineno for s in statements))
            for i, text in enumerate(texts):
                if text != want and fold(self.lines[statements[i].lineno - 1]) != want:
                    continue
                before, after = probe.get("before"), probe.get("after")
                if before and (i == 0 or texts[i - 1] != fold(before)):
                    continue
                if after and (i + 1 == len(texts) or texts[i + 1] != fold(after)):
                    continue
                matches.append((node, around, statements[i]))
        function = probe["function"]
        if not matches:
            head = want.split("(")[0].split(" ")[0].rstrip(":")
            if head in ("else", "except", "finally", "case") or want.startswith("@"):
                raise Refusal("E_ANCHOR_NOT_STMT", f'"{anchor}" is not the first line of a statement; anchor the first line inside the branch.')
            span = f"{candidates[0][0].lineno}-{candidates[-1][0].end_lineno}"
            message = f'anchor "{anchor}" matches no statement in {function} ({file}:{span}).'
            near = _nearest(want, dict(all_texts))
            if near:
                message += f' Nearest: "{near[0]}" line {dict(all_texts)[near[0]]}.'
            raise Refusal("E_ANCHOR_NONE", message)
        if len(matches) > 1:
            lines = ", ".join(str(s.lineno) for _, _, s in matches)
            raise Refusal(
                "E_ANCHOR_MANY",
                f'anchor "{anchor}" matches {len(matches)} statements in {function} (lines {lines}). Add context.before/after, or choose another line.',
            )
        return matches[0]


def _last_name(node):
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def _nearest(text, among):
    import difflib

    return difflib.get_close_matches(text, list(among), 3, 0.5)


def statement_lists(node):
    for field in ("body", "orelse", "finalbody"):
        value = getattr(node, field, None)
        if isinstance(value, list):
            yield value
    for part in list(getattr(node, "handlers", ())) + list(getattr(node, "cases", ())):
        yield part.body


def is_docstring(node, stmt):
    body = getattr(node, "body", None)
    return bool(body) and body[0] is stmt and isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)


def own_statements(function):
    """A function's statements in the order of the text, without those of
    functions and classes inside it."""

    def walk(node):
        for statements in statement_lists(node):
            for s in statements:
                if node is function and is_docstring(function, s):
                    continue
                yield s
                if not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from walk(s)

    return walk(function)


def arms(source, function):
    """A function's branches in the order of the text: node, field, line, text."""
    found = []

    def add(node, field, text):
        head = node.pattern if isinstance(node, ast.match_case) else node
        into = getattr(node, field)
        found.append((node, field, head.lineno if field == "body" or not into else into[0].lineno, text))

    def visit(statements):
        for s in statements:
            if isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            text = source.first_line(s)
            if isinstance(s, ast.If):
                add(s, "body", text)
                visit(s.body)
                if not (len(s.orelse) == 1 and isinstance(s.orelse[0], ast.If) and source.first_line(s.orelse[0]).startswith("elif")):
                    add(s, "orelse", "else of " + text)
                visit(s.orelse)
                continue
            if isinstance(s, (ast.For, ast.AsyncFor, ast.While)):
                add(s, "body", text + " (rounds)")
            visit(getattr(s, "body", ()))
            for part in [*getattr(s, "handlers", ()), *getattr(s, "cases", ())]:
                line = part.pattern.lineno if isinstance(part, ast.match_case) else part.lineno
                add(part, "body", fold(source.lines[line - 1]))
                visit(part.body)
            if getattr(s, "orelse", ()):
                add(s, "orelse", "else of " + text)
                visit(s.orelse)
            if getattr(s, "finalbody", ()):
                add(s, "finalbody", "finally")
                visit(s.finalbody)

    visit(function.body)
    return found


# ---------------------------------------------------------------------------
# Expressions.

CALLS = ("len", "type", "isinstance", "str", "int", "bool", "id")
METHODS = ("numel", "size", "dim", "stride", "data_ptr", "element_size", "is_contiguous", "get", "is_current_stream_capturing")
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, ast.LShift, ast.RShift)
WAITS = {"item": "it waits for the GPU and changes the timing under study", "cpu": "it copies from the GPU and waits", "tolist": "it copies from the GPU and waits", "numpy": "it copies from the GPU and waits", "to": "it copies", "cuda": "it copies", "synchronize": "it waits for the GPU", "clone": "it starts a kernel", "print": "it writes in the hot path"}
ALLOWED = "names, attributes, constants, x[0], comparisons, and/or/not, + - * // % & | << >>, is, in (1, 2), tuples, calls of " + ", ".join(CALLS) + " and of the methods " + ", ".join(METHODS)


def parse_expression(text):
    """An expression of the allowed kind, and the names in it."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as e:
        raise Refusal("E_EXPR", f'"{text}" is no Python expression: {e}') from None
    names = set()

    def refuse(what, why=""):
        why = ": " + why if why else ""
        raise Refusal("E_EXPR", f"{what} is not allowed in a probe{why}. Allowed: {ALLOWED}.")

    def check(node):
        match node:
            case ast.Name():
                names.add(node.id)
            case ast.Constant(value=str() | int() | bool() | None):
                pass
            case ast.Attribute():
                if node.attr in WAITS:
                    refuse("." + node.attr, WAITS[node.attr])
                check(node.value)
            case ast.Subscript(slice=ast.Constant()):
                check(node.value)
            case ast.Subscript(slice=ast.UnaryOp(op=ast.USub(), operand=ast.Constant())):
                check(node.value)
            case ast.Compare():
                check(node.left)
                for op, right in zip(node.ops, node.comparators):
                    if isinstance(op, (ast.In, ast.NotIn)) and not (isinstance(right, ast.Tuple) and all(isinstance(e, ast.Constant) for e in right.elts)):
                        refuse("in, with anything but a tuple of constants,")
                    check(right)
            case ast.BoolOp():
                for value in node.values:
                    check(value)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                check(node.operand)
            case ast.BinOp(op=op) if isinstance(op, OPERATORS):
                check(node.left)
                check(node.right)
            case ast.Tuple():
                for e in node.elts:
                    check(e)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in CALLS:
                for a in node.args:
                    check(a)
            case ast.Call(func=ast.Attribute(attr=name), keywords=[]):
                if name in WAITS:
                    refuse(f".{name}()", WAITS[name])
                if name not in METHODS:
                    refuse(f".{name}()")
                check(node.func.value)
                for a in node.args:
                    check(a)
            case ast.Call():
                name = _last_name(node) or "a call"
                refuse(name + "()", WAITS.get(name, ""))
            case _:
                refuse(type(node).__name__.lower() + " (" + ast.unparse(node) + ")")

    check(tree)
    return tree, names


def expressions(probe):
    texts = [probe["when"]] if probe.get("when") else []
    return texts + list((probe.get("labels") or {}).values())


# ---------------------------------------------------------------------------
# Putting counters into code.


class Weaver:
    """Adds the statements of probes to one file's tree. Constants that no
    source can have stand for the objects until the code is compiled."""

    def __init__(self):
        self.objects = {}
        self.fuses = []

    def constant(self, obj, key):
        mark = b"\0culprit:" + key.encode()
        self.objects[mark] = obj
        return ast.Constant(mark)

    def count(self, slot, key):
        target = ast.Subscript(ast.Attribute(self.constant(HOLD, key), "m", ast.Load()), ast.Constant(slot), ast.Store())
        return ast.AugAssign(target, ast.Add(), ast.Constant(1))

    def call(self, obj, key, method, *args):
        return ast.Call(ast.Attribute(self.constant(obj, key), method, ast.Load()), list(args), [])

    def statements(self, probe, slots):
        """What is put in front of the anchored statement."""
        i = probe["index"]
        hit = self.count(slots[HIT], f"hit:{i}")
        inner = []
        if probe.get("capture") == "split":
            inner.append(ast.If(self.call(CAPTURING, "capturing", "now"), [self.count(slots[CAPTURE], f"capture:{i}")], []))
        matched = []
        if probe.get("when"):
            matched.append(self.count(slots[MATCH], f"match:{i}"))
        if probe.get("labels"):
            values = [parse_expression(t)[0] for t in probe["labels"].values()]
            labels = Labels(i, probe.get("max_labels") or 32, slots[OVERFLOW], slots[TYPE_ERROR])
            matched.append(ast.Expr(self.call(labels, f"labels:{i}", "add", ast.Tuple(values, ast.Load()))))
        if probe.get("when"):
            test = ast.Compare(parse_expression(probe["when"])[0], [ast.Is()], [ast.Constant(True)])
            inner.append(ast.If(test, matched, []))
        else:
            inner += matched
        if not inner:
            return [hit]
        fuse = Fuse(i, slots[EXPR_ERROR])
        self.fuses.append(fuse)
        failed = [self.count(slots[EXPR_ERROR], f"error:{i}"), ast.Expr(self.call(fuse, f"fuse:{i}", "failed"))]
        handler = ast.ExceptHandler(self.constant(Exception, "Exception"), None, failed)
        on = ast.Attribute(self.constant(fuse, f"fuse:{i}"), "on", ast.Load())
        return [ast.If(on, [hit, ast.Try(inner, [handler], [], [])], [])]

    def patch(self, code):
        """Replaces the marks by the objects, in a code object and those in it."""
        consts = []
        for c in code.co_consts:
            if type(c) is bytes and c in self.objects:
                c = self.objects[c]
            elif isinstance(c, types.CodeType):
                c = self.patch(c)
            consts.append(c)
        return code.replace(co_consts=tuple(consts))


def located(statements, at):
    """Gives new statements the line of an old one, so that no traceback moves."""
    for s in statements:
        for node in ast.walk(s):
            if "lineno" in node._attributes:
                node.lineno = node.end_lineno = at.lineno
                node.col_offset, node.end_col_offset = at.col_offset, at.col_offset
    return statements


def loads(code):
    """Every constant that a code object's instructions load, marks among them."""
    return {i.argval for i in dis.get_instructions(code) if type(i.argval) is bytes}


def find_code(code, node):
    """The code object of a function's node, in that of what is around it."""
    first = min([node.lineno] + [d.lineno for d in node.decorator_list])
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            if c.co_name == node.name and c.co_firstlineno == first:
                return c
            inner = find_code(c, node)
            if inner is not None:
                return inner
    return None


def weave(data, filename, probes, slots_of):
    """Compiles a file as it is and with the probes. slots_of gives a probe's
    slots by kind. Returns the source, both codes, the weaver, and for each
    probe its place (or the refusal)."""
    source = Source(data, filename)
    weaver = Weaver()
    places, inserts = {}, []
    for p in probes:
        try:
            hashes = p.get("sha256") or []
            if hashes and source.sha256 not in hashes:
                raise Refusal(
                    "E_HASH",
                    f"{os.path.basename(filename)} differs from the source this probe was written against (deployed sha256 "
                    f"{source.sha256[:8]}…, pack {hashes[0][:8]}…). The anchor may mean something else there. "
                    "Re-read the deployed file, then: culprit probe lint --write-hash",
                )
            node, around, statement = source.place(p)
            for text in expressions(p):
                parse_expression(text)
            places[p["id"]] = (node, around, statement)
            slots = slots_of(p)
            if p.get("branch") is not None:
                branches = arms(source, node)
                if p["branch"] >= len(branches):
                    raise Refusal("E_FUNC", f"{p['function']} has {len(branches)} branches, and none with number {p['branch']}")
                branch, field, _, _ = branches[p["branch"]]
                into = getattr(branch, field)
                inserts.append((into, 0, located(weaver.statements(p, slots), into[0] if into else branch)))
                continue
            first = 1 if is_docstring(node, node.body[0]) else 0
            beginning = node.body[first] if len(node.body) > first else node.body[0]
            if statement is None:
                inserts.append((node.body, first, located(weaver.statements(p, slots), beginning)))
                continue
            if p.get("entry", True):
                inserts.append((node.body, first, located([weaver.count(slots[ENTRY], f"entry:{p['index']}")], beginning)))
            for into in lists_of(node):
                at = next((i for i, s in enumerate(into) if s is statement), None)
                if at is not None:
                    inserts.append((into, statement, located(weaver.statements(p, slots), statement)))
        except Refusal as e:
            places[p["id"]] = e
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = compile(source.tree, filename, "exec", dont_inherit=True)
        # Positions are looked up now: an insert moves those after it.
        for into, at, statements in inserts:
            if not isinstance(at, int):
                at = next(i for i, s in enumerate(into) if s is at)
            into[at:at] = statements
        probed = compile(ast.fix_missing_locations(source.tree), filename, "exec", dont_inherit=True)
    return source, plain, probed, weaver, places


def lists_of(node):
    for statements in statement_lists(node):
        yield statements
        for s in statements:
            if not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from lists_of(s)


def graft(live, probed, pairs):
    """Gives probed the code objects inside live, as far as they are equal, and
    lists (live, probed) for all that aren't."""
    inside = [c for c in live.co_consts if isinstance(c, types.CodeType)]
    consts = []
    for c in probed.co_consts:
        if isinstance(c, types.CodeType):
            own = inside.pop(0)
            c = own if own == c else graft(own, c, pairs)
        consts.append(c)
    code = probed.replace(co_consts=tuple(consts))
    pairs.append((live, code))
    return code


# ---------------------------------------------------------------------------
# The live process.


def reached(obj, seen):
    """What an attribute leads to through its decorators, itself first."""
    if obj is None or id(obj) in seen or len(seen) > 200:
        return
    seen.add(id(obj))
    yield obj
    kind, inner = type(obj), []
    if kind is types.FunctionType:
        for cell in obj.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:
                pass
    elif kind in (staticmethod, classmethod, types.MethodType):
        inner.append(obj.__func__)
    elif issubclass(kind, property):
        inner += [obj.fget, obj.fset, obj.fdel]
    elif issubclass(kind, functools.partial):
        inner.append(obj.func)
    try:
        names = vars(obj)
        inner += [names[n] for n in ("__wrapped__", "func", "fn", "py_func", "_torchdynamo_orig_callable") if n in names]
    except Exception:
        pass  # it has none
    for o in inner:
        if callable(o) or issubclass(type(o), property):
            yield from reached(o, seen)


# Whose decorators keep a function and never have the interpreter run it, by the
# first part of their type's module.
COMPILERS = {"triton": "a Triton kernel", "numba": "compiled by numba"}


def refuse_jit(chain, qualname):
    for obj in chain:
        kind = type(obj)
        what = COMPILERS.get(str(getattr(kind, "__module__", "")).partition(".")[0])
        if kind.__name__ == "ScriptFunction":
            what = "compiled by torch.jit"
        if what:
            raise Refusal("E_JIT", f"{qualname} is {what}: the interpreter never runs its body. 0 hits would mean nothing.")
        try:
            names = vars(obj)
        except TypeError:
            continue
        if "_torchdynamo_orig_callable" in names and not names.get("_torchdynamo_disable"):
            raise dynamo_refusal(qualname)


def dynamo_refusal(qualname):
    return Refusal(
        "E_DYNAMO",
        f"{qualname} is compiled by torch.compile; a probe would break or recompile its graph. Probe its caller, or start the server without torch.compile.",
    )


def attribute(module, qualname):
    """What a module has by a qualified name, or None."""
    obj = module
    for part in qualname.split("."):
        namespace = getattr(obj, "__dict__", {})
        if part not in namespace:
            return None
        obj = namespace[part]
    return obj


@contextlib.contextmanager
def thawed():
    """Lets gc find what gc.freeze hides: servers freeze all that they have after
    their warmup, their functions too. What came since is frozen with the rest
    then: a cycle of it that is garbage at this moment is never collected."""
    if not gc.get_freeze_count():
        yield
        return
    enabled = gc.isenabled()
    gc.disable()  # or a collection goes through all of it
    gc.unfreeze()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def live_code(module, filename, qualname, plain):
    """The live function's code object, which must equal plain."""
    found = attribute(module, qualname)
    chain = list(reached(found, set()))
    refuse_jit(chain, qualname)
    others = []
    for f in chain:
        if type(f) is not types.FunctionType:
            continue
        if f.__code__ == plain:
            return f.__code__
        if f.__code__.co_name == plain.co_name:
            others.append(f)
    with thawed():
        everything = gc.get_objects()
    for f in everything:
        if type(f) is types.FunctionType and f.__code__.co_name == plain.co_name and f.__code__.co_filename == filename:
            if f.__code__ == plain:
                return f.__code__
            if f.__qualname__ == qualname:
                others.append(f)
    if not others and found is not None:
        raise Refusal("E_NOT_PYTHON", f"{qualname} is a builtin/Cython function; use a native probe.")
    if not others:
        raise Refusal("E_FUNC", f"{os.path.basename(filename)} defines {qualname}, but PID {os.getpid()} has no such function: it was deleted or replaced.")
    raise Refusal(
        "E_CODE_DIFFERS",
        f"PID {os.getpid()}: {qualname} in memory is not what {os.path.basename(filename)} compiles to "
        "(file changed after import, or another tool or patch replaced it). Refusing.",
    )


def refuse_compiled(code, qualname, module):
    """Refuses a function that torch.compile has compiled already, by itself or
    as a part of another: the guards of compiled code hold the addresses of the
    functions' code objects. They don't of a model's methods, so none of these is
    taken where a model has been compiled."""
    frames, convert = sys.modules.get("torch._dynamo.eval_frame"), sys.modules.get(Dynamo.MODULE)
    models = False
    try:
        entries = frames._debug_get_cache_entry_list
        if entries(code):
            raise dynamo_refusal(qualname)
        for other in [ref() for ref in convert.input_codes.seen]:
            for entry in entries(other) if other is not None else ():
                models = models or other.co_name == "forward"
                if re.search(rf"\b{id(code)}\b", str(entry.guard_manager)):
                    raise dynamo_refusal(qualname)
    except AttributeError:
        return  # nothing is compiled here, or torch is another: see Dynamo
    owner = attribute(module, qualname.rpartition(".")[0]) if "." in qualname else None
    if models and isinstance(owner, type) and issubclass(owner, sys.modules["torch"].nn.Module):
        raise Refusal(
            "E_DYNAMO",
            f"{qualname} may be part of a model that torch.compile has compiled in PID {os.getpid()}: 0 hits would mean nothing. "
            "With culprit probe run from the start it is known.",
        )


class OwnFrame:
    """A frame of probed code as torch.compile sees it: with its own code."""

    def __init__(self, frame, code):
        self.frame, self.f_code = frame, code

    def __getattr__(self, name):
        return getattr(self.frame, name)


class Dynamo:
    """Keeps probed code from torch.compile, which would fail on it, and the
    server with it: before it reads a function, the function has its own code
    back, and its probes are refused."""

    MODULE = "torch._dynamo.convert_frame"

    def __init__(self, give_up):
        self.give_up = give_up  # takes a code object; returns the function's own one
        self.replaced = []  # owner, name, what was there

    def watch(self, module):
        functions = sys.modules.get("torch._dynamo.variables.functions")
        frames = getattr(module, "CatchErrorsWrapper", None)
        if functions is None or frames is None:
            raise Refusal("E_DYNAMO", "this version of torch.compile isn't known: a probe in what it compiles makes it fail.")
        for kind in list(vars(functions).values()):
            if isinstance(kind, type) and "get_code" in vars(kind):
                self.replace(kind, "get_code", self.code_of)
        self.replace(frames, "__call__", self.frame_of)

    def replace(self, owner, name, wrap):
        old = vars(owner)[name]
        self.replaced.append((owner, name, old))
        setattr(owner, name, functools.wraps(old)(wrap(old)))

    def code_of(self, get_code):
        return lambda variable: self.give_up(get_code(variable))

    def frame_of(self, call):
        # What is made of its own code runs in the probed frame too: they have
        # the same variables.
        def look(wrapper, frame, *rest, **more):
            own = self.give_up(frame.f_code)
            return call(wrapper, frame if own is frame.f_code else OwnFrame(frame, own), *rest, **more)

        return look

    def stop(self):
        for owner, name, old in self.replaced:
            setattr(owner, name, old)
        self.replaced = []


def check_names(probe, code, around, module_names):
    if code is None:
        return  # it is optimised away, which is told elsewhere
    known = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    outer = set()
    for c in filter(None, around):
        outer |= {*c.co_varnames, *c.co_cellvars}
    for text in expressions(probe):
        for name in parse_expression(text)[1]:
            if name in known:
                continue
            if name in outer:
                raise Refusal("E_CLOSURE", f'expression uses "{name}" of the enclosing function, which {probe["function"]} does not capture; the probe would change F\'s closure.'.replace("F's", probe["function"] + "'s"))
            if name in module_names or hasattr(builtins, name):
                continue
            raise Refusal("E_NAME", f'"{name}" is neither a local of {probe["function"]} nor a global of the module.')


def check_code(probe, plain, probed, place):
    """Refuses a probe whose counter isn't in the code, or that changes more
    than it should."""
    node, around, _ = place
    a, b = find_code(plain, node), find_code(probed, node)
    if a is None or b is None:
        raise Refusal("E_OPTIMISED", f"{probe['function']} is optimised away by this interpreter; 0 hits would mean nothing.")
    if a.co_freevars != b.co_freevars or a.co_cellvars != b.co_cellvars:
        raise Refusal("E_CLOSURE", f"the probe would change the closure of {probe['function']}.")
    if b"\0culprit:hit:%d" % probe["index"] not in loads(b):
        what = f'anchor "{probe["anchor"]}"' if probe.get("anchor") else f"branch {probe.get('branch')}"
        raise Refusal("E_OPTIMISED", f"{what} of {probe['function']} is optimised away by this interpreter (a constant condition, -O, or code after a return). 0 hits would mean nothing.")


def weave_sound(data, filename, probes, slots_of, module_names):
    """Weaves the probes that can be placed, and says why the others can't: what
    is refused must not be in the code of the others. Names are checked first,
    since a wrong one changes the code around it."""
    bad = {}
    checks = (
        lambda p, plain, probed, place: check_names(p, find_code(plain, place[0]), [find_code(plain, n) for n in place[1]], module_names),
        lambda p, plain, probed, place: check_code(p, plain, probed, place),
    )
    while True:
        source, plain, probed, weaver, places = weave(data, filename, [p for p in probes if p["id"] not in bad], slots_of)
        bad |= {i: e for i, e in places.items() if isinstance(e, Refusal)}
        placed = [p for p in probes if p["id"] not in bad]
        for check in checks:
            for p in placed:
                try:
                    check(p, plain, probed, places[p["id"]])
                except Refusal as e:
                    bad[p["id"]] = e
            if any(p["id"] in bad for p in placed):
                break
        else:
            return source, plain, probed, weaver, places, placed, bad


# What stops in the middle of a function, and where it has its code.
SUSPENDS = {
    types.GeneratorType: ("generators", "gi_code"),
    types.CoroutineType: ("coroutines", "cr_code"),
    types.AsyncGeneratorType: ("async generators", "ag_code"),
}


def contains(outer, code):
    """Whether a code object is inside another."""
    return any(c is code or contains(c, code) for c in outer.co_consts if type(c) is types.CodeType)


class Agent:
    """One process's probes."""

    def __init__(self):
        self.directory = None
        self.counters = None
        self.probes = []
        self.status = {}  # by probe's id
        self.pairs = []  # (original code, probed code)
        self.slots = {}
        self.mode = 0
        self.finder = None
        self.monitored = []
        self.state = BUILDING
        self.errors = []
        self.forks = False
        self.fuses = []
        self.dynamo = Dynamo(self.give_up)

    # --- begin and end

    def start(self, directory, mode):
        if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled():
            raise Refusal("E_FREE_THREADED", f"PID {os.getpid()} is a free-threaded build; counters would lose updates.")
        with open(os.path.join(directory, "pack.json"), "rb") as f:
            pack = json.load(f)
        if self.state == ARMED:
            raise Refusal("E_ALREADY", f"PID {os.getpid()} already has pack {self.pack['name']} (run {os.path.basename(self.directory)}). Detach it first.")
        self._begin_run(directory, pack, mode)
        self.self_test()
        if not self.forks:
            # Such hooks can't be taken back: a detached agent leaves one that does nothing.
            os.register_at_fork(after_in_child=self.after_fork)
            self.forks = True
        self.state = ARMED
        late = mode == LAUNCHED
        for file in dict.fromkeys(p["file"] for p in self.probes):
            modules = loaded(file)
            files = {m.__file__ for m in modules}
            if len(files) > 1:
                names = ", ".join(sorted(m.__name__ for m in modules)[:4])
                self.refuse(file, Refusal("E_MODULE_MANY", f"{file} matches {len(files)} loaded modules: {names}. Give a longer path."))
                continue
            if any(getattr(m.__spec__, "_initializing", False) for m in modules):
                self.refuse(file, Refusal("E_NOT_IMPORTED", f"PID {os.getpid()} is importing {file} just now. Detach, and attach again when it has started."))
                continue
            for m in modules:
                if m.__name__ == "__main__" and self.missing(file, m):
                    late = True  # it is being run just now, and hasn't come to them
                else:
                    self.arm(file, m)
        self.finder = Finder(self)
        sys.meta_path.insert(0, self.finder)
        if Dynamo.MODULE in sys.modules:
            self.watch_dynamo(sys.modules[Dynamo.MODULE])
        self.publish(ARMED)
        if late:
            self.wait_for_main()

    def _begin_run(self, directory, pack, mode):
        self.directory, self.pack, self.mode = directory, pack, mode
        self.probes = pack["probes"]
        for i, p in enumerate(self.probes):
            p["index"] = i
        self.pairs, self.slots, self.monitored, self.errors, self.fuses = [], {}, [], [], []
        self.status = {
            p["id"]: {
                "state": "waiting",
                "code": "E_NOT_IMPORTED",
                "message": f"PID {os.getpid()} has not imported {p['file']}. Waiting: this process cannot hit the probe now.",
            }
            for p in self.probes
        }
        self.counters = Counters(directory, pack["sha256"], mode)
        HOLD.m = self.counters.slots

    def detach(self):
        """Gives every function the code object that it had."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        self.restore(self.pairs)
        self.dynamo.stop()
        self.stop_monitoring()
        self.pairs = []
        self.state = DETACHED
        for s in self.status.values():
            if s["state"] in ("armed", "waiting"):
                s["state"] = "detached"
        self.counters.header[DISARMED_AT] = time.monotonic_ns()
        self.publish(DETACHED)
        # A call that is still in probed code counts on, where nobody reads it.
        HOLD.m = nowhere()
        self.counters.close()

    def restore(self, pairs):
        """Gives functions their own code objects back: by the code, not by a
        list of functions, since closures made meanwhile have it too."""
        if not pairs:
            return
        original = {id(b): a for a, b in pairs}
        with thawed():
            referrers = gc.get_referrers(*(b for _, b in pairs))
        for r in referrers:
            if type(r) is types.FunctionType and id(r.__code__) in original:
                r.__code__ = original[id(r.__code__)]

    def watch_dynamo(self, module):
        try:
            self.dynamo.watch(module)
        except Refusal as e:
            self.errors.append(str(e))

    def give_up(self, code):
        """torch.compile is about to read a code object: a function that is
        probed gets its own back, for good."""
        original = next((a for a, b in self.pairs if b is code), None)
        if original is None:
            return code
        gone = [(a, b) for a, b in self.pairs if b is code or contains(b, code) or contains(code, b)]
        self.restore(gone)
        self.pairs = [p for p in self.pairs if p not in gone]
        for p in self.probes:
            if any(a.co_qualname == p["function"] for a, _ in gone) and self.status[p["id"]]["state"] == "armed":
                e = dynamo_refusal(p["function"])
                self.status[p["id"]] |= {"state": "refused", "code": e.code, "message": str(e)}
        self.publish(ARMED)
        return original

    def publish(self, state):
        """Writes what became of each probe, then the state."""
        c = self.counters
        c.header[ARMED_AT] = c.header[ARMED_AT] or time.monotonic_ns()
        report = {
            "pid": c.pid,
            "start_ticks": c.ticks,
            "python": ".".join(map(str, sys.version_info[:3])),
            "executable": sys.executable,
            "mode": {LAUNCHED: "launched", ATTACHED: "attached", LAUNCHED | FORKED: "forked", ATTACHED | FORKED: "forked"}.get(self.mode, ""),
            "pack": self.pack["name"],
            "probes": [{"id": p["id"], **self.status[p["id"]]} for p in self.probes],
            "errors": self.errors[-20:],
        }
        path = os.path.join(self.directory, c.name + ".json")
        try:
            with open(path + ".tmp", "w", encoding="utf-8", errors="replace") as f:
                json.dump(report, f)
            os.replace(path + ".tmp", path)
        except OSError:
            c.header[AGENT_ERRORS] += 1
        c.header[STATE] = state

    def after_fork(self):
        if self.state != ARMED:
            return
        try:
            parent = self.counters
            self.mode |= FORKED
            self.counters = Counters(self.directory, self.pack["sha256"], self.mode)
            self.counters.copy_table(parent)
            HOLD.m = self.counters.slots
            for fuse in self.fuses:
                fuse.on = True
            self.publish(ARMED)
        except BaseException:
            # The child counts into memory that nobody reads, never into its parent's file.
            HOLD.m = nowhere()

    # --- placing probes

    def imported(self, file, module):
        """A probed file has just been imported."""
        armed = {self.status[p["id"]].get("file") for p in self.probes if p["file"] == file and self.status[p["id"]]["state"] == "armed"}
        if armed and module.__file__ not in armed:
            self.errors.append(f"{file} matches 2 loaded modules: {armed.pop()}, {module.__file__}. Give a longer path.")
        else:
            self.arm(file, module)
        self.publish(ARMED)

    def slots_of(self, probe):
        i = probe["index"]
        if i in self.slots:
            return self.slots[i]
        kinds = [HIT]
        if (probe.get("anchor") and probe.get("entry", True)):
            kinds.append(ENTRY)
        if probe.get("when"):
            kinds.append(MATCH)
        if probe.get("labels"):
            kinds += [OVERFLOW, TYPE_ERROR]
        if probe.get("when") or probe.get("labels") or probe.get("capture") == "split":
            kinds.append(EXPR_ERROR)
        if probe.get("capture") == "split":
            kinds.append(CAPTURE)
        slots = {k: self.counters.slot(i, k) for k in kinds}
        if None in slots.values():
            raise Refusal("E_PACK", f"the counter file is full at probe {probe['id']}: fewer probes, or fewer labels")
        self.slots[i] = slots
        return slots

    def refuse(self, file, refusal):
        for p in self.probes:
            if p["file"] == file:
                self.status[p["id"]] = {"state": "refused", "code": refusal.code, "message": str(refusal)}

    def arm(self, file, module):
        """Places the probes of one file, in a module that was imported."""
        try:
            self._arm(file, module)
        except Refusal as e:
            self.refuse(file, e)
        except Exception as e:
            self.counters.header[AGENT_ERRORS] += 1
            self.refuse(file, Refusal("E_AGENT", f"PID {os.getpid()}: placing the probes of {file} failed: {type(e).__name__}: {e}"))

    def _arm(self, file, module):
        probes = [p for p in self.probes if p["file"] == file]
        filename = module.__file__
        with open(filename, "rb") as f:
            data = f.read()
        began = time.thread_time_ns()
        source, plain, probed, weaver, places, good, bad = weave_sound(data, filename, probes, self.slots_of, vars(module))
        for i, e in bad.items():
            self.status[i] = {"state": "refused", "code": e.code, "message": str(e)}
        outermost = {}
        for p in good:
            node, around, _ = places[p["id"]]
            outer = (around or (node,))[0]
            outermost.setdefault(id(outer), (outer, []))[1].append(p)
        found = {}
        for outer, group in outermost.values():
            qualname = group[0]["function"].split(".<locals>.")[0]
            try:
                original = live_code(module, filename, qualname, find_code(plain, outer))
                refuse_compiled(original, qualname, module)
                pairs = []
                graft(original, weaver.patch(find_code(probed, outer)), pairs)
                for _, code in pairs:
                    hash(code)
            except Refusal as e:
                for p in group:
                    self.status[p["id"]] = {"state": "refused", "code": e.code, "message": str(e)}
                continue
            for p in group:
                found[p["id"]] = {"functions": 0, "suspended": {}, "pairs": pairs}
        self.fuses += weaver.fuses
        self.swap(list(found.values()))
        for p in good:
            if p["id"] in found:
                self.armed(p, source, places[p["id"]], found[p["id"]], plain, began)

    def swap(self, founds):
        """Gives every live function of the original code objects the probed
        ones. One look at all objects finds them, closures among them, and the
        calls that go on with the old code."""
        of = {id(a): (a, b, [f for f in founds if (a, b) in f["pairs"]]) for f in founds for a, b in f["pairs"]}
        if not of:
            return
        with thawed():
            referrers = gc.get_referrers(*(a for a, _, _ in of.values()))
        for r in referrers:
            if type(r) is types.FunctionType and id(r.__code__) in of:
                _, r.__code__, users = of[id(r.__code__)]
                for f in users:
                    f["functions"] += 1
            elif type(r) in SUSPENDS:
                what, code = SUSPENDS[type(r)]
                for f in of[id(getattr(r, code))][2] if id(getattr(r, code)) in of else ():
                    f["suspended"][what] = f["suspended"].get(what, 0) + 1
        self.pairs += [(a, b) for a, b, _ in of.values()]

    def armed(self, probe, source, place, found, plain, began):
        node, _, statement = place
        code = find_code(plain, node)
        status = {
            "state": "armed",
            "file": source.name,
            "sha256": source.sha256,
            "line": (statement or node).lineno,
            "functions": found["functions"],
            "stall_us": (time.thread_time_ns() - began) // 1000,
        }
        if probe.get("branch") is not None:
            status["line"] = 0
        old = [a for a, _ in found["pairs"] if a == code]
        running = [r for c in old for r in running_in(c)]
        if found["suspended"]:
            what = " and ".join(f"{n} {what}" for what, n in found["suspended"].items())
            status["message"] = f"{what} of {probe['function']} are suspended with the old code; they are not counted."
            status["code"] = "E_SUSPENDED"
        if running:
            thread, line = running[0]
            if probe.get("reach") == "running" and hasattr(sys, "monitoring") and self.monitor(probe, old[0], status["line"]):
                status["message"] = f"{probe['function']} is running now in thread {thread}: sys.monitoring counts it there."
                status["code"] = "I_MONITORED"
            else:
                status["message"] = (
                    f"{probe['function']} is running now in thread {thread} ({os.path.basename(source.name)}:{line}) and has not returned since before the attach; "
                    "the probe takes effect at its next call, which may never come. Python 3.12+: reach: running. Python 3.11: restart under \"culprit probe run\"."
                )
                status["code"] = "E_RUNNING"
        self.status[probe["id"]] = status

    # --- frames that run already: CPython 3.12 and newer

    def monitor(self, probe, code, line):
        mon = sys.monitoring
        tool = next((t for t in range(5, -1, -1) if mon.get_tool(t) in (None, "culprit")), None)
        if tool is None:
            return False
        if mon.get_tool(tool) is None:
            mon.use_tool_id(tool, "culprit")
            self.monitored_at = {}
            mon.register_callback(tool, mon.events.LINE, self.on_line)
        slots = self.slots[probe["index"]]
        labels = Labels(probe["index"], probe.get("max_labels") or 32, slots[OVERFLOW], slots[TYPE_ERROR]) if probe.get("labels") else None
        fuse = Fuse(probe["index"], slots.get(EXPR_ERROR))
        self.fuses.append(fuse)
        values = "(" + "".join(f"({t}), " for t in (probe.get("labels") or {}).values()) + ")"
        compiled = [compile(t, "<probe>", "eval") for t in (probe.get("when") or "True", values)]
        self.monitored_at.setdefault((code, line), []).append((slots, labels, fuse, *compiled))
        mon.set_local_events(tool, code, mon.events.LINE)
        self.monitored.append((tool, code))
        return True

    def on_line(self, code, line):
        at = self.monitored_at.get((code, line))
        if at is None:
            return sys.monitoring.DISABLE
        for slots, labels, fuse, when, values in at:
            if not fuse.on:
                continue
            HOLD.m[slots[HIT]] += 1
            if EXPR_ERROR not in slots:
                continue
            try:
                if CAPTURE in slots and CAPTURING.now():
                    HOLD.m[slots[CAPTURE]] += 1
                frame = sys._getframe(1)
                if eval(when, frame.f_globals, frame.f_locals) is not True:
                    continue
                if MATCH in slots:
                    HOLD.m[slots[MATCH]] += 1
                if labels is not None:
                    labels.add(eval(values, frame.f_globals, frame.f_locals))
            except Exception:
                HOLD.m[slots[EXPR_ERROR]] += 1
                fuse.failed()

    def stop_monitoring(self):
        for tool, code in self.monitored:
            sys.monitoring.set_local_events(tool, code, 0)
        for tool in {t for t, _ in self.monitored}:
            sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, None)
            sys.monitoring.free_tool_id(tool)
        self.monitored = []

    # --- is the engine itself sound in this process?

    def self_test(self):
        """Counts a known number of calls through the same engine, and times it."""
        text = b"def f(i):\n    x = i % 64\n    return x\n"
        probe = {"id": "self-test", "index": 0xFFFF, "function": "f", "anchor": "return x", "when": "i % 64 != 0", "entry": False}
        slots = {k: self.counters.slot(0xFFFF, SELF_TEST) for k in (HIT, MATCH, EXPR_ERROR)}
        _, plain, probed, weaver, places = weave(text, "<culprit self-test>", [probe], lambda p: slots)
        node = places["self-test"][0]
        a, b = find_code(plain, node), weaver.patch(find_code(probed, node))
        f = types.FunctionType(a, {})
        h, m = self.counters.header, self.counters.slots
        for i in range(100):
            f(i)
        stray = m[slots[HIT]] + m[slots[MATCH]]
        f.__code__ = b
        for i in range(TEST_HITS):
            f(i)
        f.__code__ = a
        for i in range(100):
            f(i)
        got = (m[slots[HIT]], m[slots[MATCH]])
        h[TEST_WANT], h[TEST_GOT] = TEST_HITS + TEST_MATCHES, sum(got)
        if stray or got != (TEST_HITS, TEST_MATCHES):
            raise Refusal("E_SELFTEST", f"self-test in PID {os.getpid()} counted {got[0]} of {TEST_HITS} hits. The probe does not work in this process; counts are not shown.")
        times = []
        for code in (a, b, a, b):
            f.__code__ = code
            began = time.thread_time_ns()  # others may have the core meanwhile
            for i in range(5000):
                f(i)
            times.append(time.thread_time_ns() - began)
        h[PICOSECONDS] = max(0, min(times[1], times[3]) - min(times[0], times[2])) // 5
        for s in slots.values():
            m[s] = 0
        m[slots[HIT]], m[slots[MATCH]] = got

    # --- the file that runs as __main__

    def missing(self, file, module):
        return any(attribute(module, p["function"].split(".<locals>.")[0]) is None for p in self.probes if p["file"] == file)

    def wait_for_main(self):
        """The main module isn't imported, so no hook tells when it has run: a
        thread looks for its functions until they are there, then ends."""
        argv = getattr(sys, "orig_argv", [])
        files = [f for f in dict.fromkeys(p["file"] for p in self.probes) if any(same_file(a, f) for a in argv[1:]) or module_argument(argv, f)]
        if not files:
            return

        def look():
            until = time.monotonic() + MAIN_WAIT_S
            while files and time.monotonic() < until and self.state == ARMED:
                time.sleep(0.02)
                main = sys.modules.get("__main__")
                for f in list(files):
                    if not same_file(getattr(main, "__file__", None), f):
                        continue
                    if not self.missing(f, main) or time.monotonic() > until - 1:
                        self.arm(f, main)
                        self.publish(ARMED)
                        files.remove(f)

        threading.Thread(target=look, name="culprit-main", daemon=True).start()


def running_in(code):
    """Threads that are inside a code object, with the line."""
    found = []
    for thread, frame in sys._current_frames().items():
        while frame is not None:
            if frame.f_code is code:
                found.append((thread, frame.f_lineno))
            frame = frame.f_back
    return found


def same_file(path, suffix):
    return isinstance(path, str) and (path == suffix or path.endswith("/" + suffix))


def module_argument(argv, file):
    for a, b in zip(argv, argv[1:]):
        if a == "-m" and (b.replace(".", "/") + ".py", b.replace(".", "/") + "/__main__.py").count(file):
            return True
    return False


def loaded(file):
    return [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType) and same_file(getattr(m, "__file__", None), file)]


class Finder:
    """Sees a probed file's import, and places the probes when it has run."""

    def __init__(self, agent):
        self.agent = agent
        self.stems = {}
        for p in agent.probes:
            directory, name = os.path.split(p["file"])
            stem = os.path.basename(directory) if name == "__init__.py" else name.removesuffix(".py")
            self.stems.setdefault(stem, set()).add(p["file"])

    def find_spec(self, name, path=None, target=None):
        files = self.stems.get(name.rpartition(".")[2], ())
        if not files and name != Dynamo.MODULE:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self.watch(spec, files)
                return spec
        return None

    def watch(self, spec, files):
        file = next((f for f in files if same_file(spec.origin, f)), None)
        if file is None and spec.name != Dynamo.MODULE or not hasattr(spec.loader, "exec_module"):
            return
        agent, loader, run = self.agent, spec.loader, spec.loader.exec_module

        def exec_module(module):
            try:
                del loader.exec_module
            except AttributeError:
                pass
            run(module)
            if agent.state != ARMED:
                return
            if spec.name == Dynamo.MODULE:
                agent.watch_dynamo(module)
            if file is not None:
                agent.imported(file, module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            agent.counters.header[AGENT_ERRORS] += 1


AGENT = Agent()
CAPTURING = Capturing()


def begin(directory, mode=LAUNCHED):
    """Starts the agent in this process. It never raises."""
    try:
        if os.path.exists(os.path.join(directory, "closed")):
            return
        if AGENT.state == ARMED and AGENT.directory == directory:
            return  # it was asked twice
        AGENT.start(directory, mode)
    except BaseException as e:
        note(directory, e)
        if AGENT.counters is not None and AGENT.state != ARMED:
            AGENT.counters.header[STATE] = REFUSED


def end(directory):
    """Takes everything out again. It never raises."""
    try:
        if AGENT.state == ARMED and AGENT.directory == directory:
            AGENT.detach()
    except BaseException as e:
        note(directory, e)


def note(directory, e):
    """Leaves word of why the agent isn't at work here."""
    try:
        code = getattr(e, "code", None)
        code = code if isinstance(code, str) else "E_AGENT"
        path = os.path.join(directory, f"{os.getpid()}.refused.json")
        with open(path + ".tmp", "w", encoding="utf-8") as f:
            json.dump({"pid": os.getpid(), "code": code, "message": f"{e}" if code != "E_AGENT" else f"{type(e).__name__}: {e}"}, f)
        os.replace(path + ".tmp", path)  # whoever waits for it reads it whole
    except Exception:
        pass


# ---------------------------------------------------------------------------
# Outside a server: the same rules, told about files on disk. One request, as
# JSON on standard input; one answer, as JSON on standard output.


def lint(request):
    answers = []
    for file, probes in by_file(request["probes"]):
        path = request["files"].get(file)
        if path is None:
            answers += [{"id": p["id"], "code": "E_FILE", "message": f"no file {file} under {request['root']}"} for p in probes]
            continue
        with open(path, "rb") as f:
            data = f.read()
        slots = dict.fromkeys(range(9), 0)
        try:
            names = bound_names(ast.parse(data))
            source, _, _, _, places, _, bad = weave_sound(data, path, probes, lambda p: slots, names)
        except (SyntaxError, ValueError) as e:
            answers += [{"id": p["id"], "code": "E_PACK", "message": f"{file} is no Python file for {sys.version.split()[0]}: {e}"} for p in probes]
            continue
        for p in probes:
            answer = {"id": p["id"], "sha256": source.sha256}
            if e := bad.get(p["id"]):
                answer |= {"code": e.code, "message": str(e)}
            else:
                node, _, statement = places[p["id"]]
                answer["line"] = (statement or node).lineno
                answer["warnings"] = ["len() of a tensor takes 350 ns: .size(0) takes 60" for t in expressions(p) if "len(" in t]
            answers.append(answer)
    return {"probes": answers}


def bound_names(tree):
    """Every name that a module binds somewhere: more than its globals, which
    are only known when it runs."""
    names = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            names.add(n.id)
        elif isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(n.name)
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            names |= {(a.asname or a.name).split(".")[0] for a in n.names}
    return names


def by_file(probes):
    files = {}
    for i, p in enumerate(probes):
        p["index"] = i
        files.setdefault(p["file"], []).append(p)
    return files.items()


def branches(request):
    with open(request["path"], "rb") as f:
        source = Source(f.read(), request["path"])
    node, _ = source.function(request["function"])[0]
    found = [{"number": i, "line": line, "text": text} for i, (_, _, line, text) in enumerate(arms(source, node))]
    return {"sha256": source.sha256, "line": node.lineno, "branches": found}


def find(request):
    """Every place of a text in files: the function, the statement, and a pack's
    way to name it."""
    places, skipped = [], 0
    text = request["text"]
    for path in request["paths"]:
        with open(path, "rb") as f:
            data = f.read()
        if text.encode() not in data:
            continue
        try:
            source = Source(data, path)
        except (SyntaxError, ValueError):
            skipped += 1
            continue
        spans = []
        for qualname, nodes in source.functions.items():
            for node, _ in nodes:
                spans.append((node.end_lineno - node.lineno, node.lineno, node.end_lineno, qualname, node, len(nodes)))
        spans.sort(key=lambda s: s[0])
        for i, line in enumerate(source.lines, 1):
            if text not in line:
                continue
            place = {"path": path, "line": i, "text": fold(line)[:200], "sha256": source.sha256}
            inside = next((s for s in spans if s[1] <= i <= s[2]), None)
            if inside:
                place["function"] = inside[3]
                within(source, inside[4], i, place)
            places.append(place)
    return {"places": places, "skipped": skipped}


def within(source, node, line, place):
    statements = list(own_statements(node))
    around = [s for s in statements if s.lineno <= line <= s.end_lineno]
    if not around:
        return  # the def line, a docstring or a comment
    s = min(around, key=lambda s: s.end_lineno - s.lineno)
    texts = [source.first_line(x) for x in statements]
    at = next(i for i, x in enumerate(statements) if x is s)
    place["anchor"], same = texts[at], [i for i, t in enumerate(texts) if t == texts[at]]
    if len(same) > 1 and at > 0:
        place["before"] = texts[at - 1]
    if len(same) > 1 and at + 1 < len(texts):
        place["after"] = texts[at + 1]


def cost(request):
    """Nanoseconds that each way to say "this line ran" adds to a call."""
    import logging
    import tempfile

    directory = tempfile.mkdtemp(prefix="culprit-cost-")
    log = logging.getLogger("culprit-cost")
    log.propagate = False
    handler = logging.FileHandler(os.path.join(directory, "log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    AGENT.counters = Counters(directory, "0" * 64, 0)
    HOLD.m = AGENT.counters.slots
    text = b"class T:\n    def numel(self):\n        return 100\ndef f(i, t):\n    x = i % 64\n    y = x + 1\n    return y\ndef logged(i, t):\n    x = i % 64\n    y = x + 1\n    log.info('free %d', i)\n    return y\n"
    labels = {"odd": "x % 2", "kind": "type(t).__name__"}
    ways = {
        "counter": {},
        "counter, condition": {"when": "t.numel() % 64 != 0"},
        "counter, condition, two labels": {"when": "t.numel() % 64 != 0", "labels": labels},
    }
    names = {"log": log}
    exec(compile(text, "<cost>", "exec"), names)
    f, logged, t = names["f"], names["logged"], names["T"]()
    original, codes = f.__code__, {}
    for i, (way, more) in enumerate(ways.items()):
        probe = {"id": way, "index": i, "function": "f", "anchor": "return y", "entry": False, **more}
        _, _, probed, weaver, places = weave(text, "<cost>", [probe], AGENT.slots_of)
        codes[way] = weaver.patch(find_code(probed, places[way][0]))

    def timed(function, code, calls):
        """Processor time of a call: others may have the core meanwhile."""
        function.__code__ = code
        began = time.thread_time_ns()
        for i in range(calls):
            function(i, t)
        return (time.thread_time_ns() - began) / calls

    calls, rounds = request.get("calls", 20_000), request.get("rounds", 25)
    ways = {w: (f, c, calls) for w, c in codes.items()} | {"logging.info to a file": (logged, logged.__code__, calls // 20)}
    base, taken = [], {w: [] for w in ways}
    for _ in range(rounds):
        base.append(timed(f, original, calls))
        for way, (function, code, n) in ways.items():
            taken[way].append(timed(function, code, n))
    handler.close()
    import shutil

    shutil.rmtree(directory)
    middle = lambda v: sorted(v)[len(v) // 2]
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "call_ns": round(middle(base), 1),
        "ways": [{"way": w, "best_ns": round(min(v) - min(base), 1), "median_ns": round(middle(v) - middle(base), 1)} for w, v in taken.items()],
    }


def main():
    request = json.load(sys.stdin)
    try:
        answer = {"lint": lint, "branches": branches, "find": find, "cost": cost}[request["op"]](request)
    except Refusal as e:
        answer = {"code": e.code, "message": str(e)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
