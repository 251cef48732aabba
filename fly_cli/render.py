"""The answer on its way to the reader: as it is for a pipe, live and coloured for a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import dropwhile, groupby, takewhile
from typing import Literal, Protocol, TextIO

from .events import Drafted, Event, Finished, Round, Started
from .graphemes import LINE_START, clusters, visible
from .streams import can_encode, terminal_size, write
from .theme import DRAFTED, REJECTED, ColorPolicy, Piece, paint

SAVE_CURSOR, RESTORE_CURSOR, ERASE_BELOW, RESET = "\x1b7", "\x1b8", "\x1b[J", "\x1b[0m"
DOWN_SAME_COLUMN = "\x1bD"  # scrolls at the bottom; a newline would return to column 0
MIN_COLUMNS = 10  # of a terminal on which the round in flight is shown
MOST_WAITING = 64  # clusters kept back behind a full row: without width they could be as many as the answer has


class Sink(Protocol):
    """What takes the events of a run."""

    def handle(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Released:
    """Turns events into the text that may be shown: all but what may still become a stop string.

    Drafted text that was turned down is no part of the answer. With `rejected` it comes in its place all the same,
    with the role `rejected`: always ("kept"), or unless text before it is held back into the next round ("passing").
    """

    def __init__(self, rejected: Literal["no", "passing", "kept"] = "no") -> None:
        self._rejected = rejected
        self._queue: deque[Piece] = deque()
        self._waiting = 0  # characters of the answer in the queue
        self._length = 0  # characters of the answer so far
        self._last_role = ""

    def take(self, event: Event) -> list[Piece]:
        """The pieces that the event releases."""
        self._drop_passing()
        match event:
            case Started():
                self._add(event.first.text, event.first.origin)
                return self._release(event.held)
            case Round():
                self._add_round(event)
                return self._release(event.held)
            case Drafted():
                return []
            case Finished():
                self._add(event.tail, self._last_role)
                pieces = self._release(self._length - len(event.text))
                self._queue.clear()  # the stop string, and what came after it in its last token
                self._waiting = 0
                return pieces

    def rest(self) -> list[Piece]:
        """What is still held back, for a run that was interrupted: no stop string came of it."""
        self._drop_passing()
        return self._release(0)

    @property
    def holding(self) -> bool:
        return self._waiting > 0

    def _drop_passing(self) -> None:
        if self._rejected == "passing" and self._queue:
            self._queue = deque(piece for piece in self._queue if piece.role != REJECTED)

    def _add(self, text: str, role: str) -> None:
        if text:
            self._queue.append(Piece(text, role))
            self._waiting += len(text)
            self._length += len(text)
        self._last_role = role

    def _add_round(self, event: Round) -> None:
        kept = event.verdict.num_kept
        for token in event.tokens[:kept]:
            self._add(token.text, token.origin)
        if self._rejected != "no" and len(event.tokens) > kept:
            text = "".join(token.text for token in event.drafted[kept:])
            if text:
                self._queue.append(Piece(text, REJECTED))
        for token in event.tokens[kept:]:
            self._add(token.text, token.origin)

    def _release(self, held: int) -> list[Piece]:
        pieces: list[Piece] = []
        while self._queue:
            text, role = self._queue[0]
            room = len(text) if role == REJECTED else min(len(text), self._waiting - held)
            if room <= 0:
                break
            pieces.append(Piece(text[:room], role))
            if role != REJECTED:
                self._waiting -= room
            if room == len(text):
                self._queue.popleft()
            else:
                self._queue[0] = Piece(text[room:], role)
        return pieces


class PlainRenderer:
    """Writes the answer's text as it is, and flushes it round by round; `close` ends it with a newline."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._released = Released()
        self._last: str | None = None  # last character written; "" before the first, None before the run

    def handle(self, event: Event) -> None:
        self._write(self._released.take(event))

    def close(self) -> None:
        """Write what an interrupted run still held back, and the final newline."""
        if self._last is None:
            return
        self._write(self._released.rest())
        if self._last != "\n":
            write(self._stream, "\n")
        self._last = None

    def _write(self, pieces: Iterable[Piece]) -> None:
        text = "".join(piece.text for piece in pieces)
        self._last = text[-1:] or self._last or ""
        if text:
            write(self._stream, text)


class TerminalRenderer:
    """Writes the answer in the colours of its tokens' origins.

    With `policy.live` the round in flight is shown: drafted tokens dim, then judged, the rejected ones struck until
    the next block is drafted. Text is settled (written once, and left to the terminal) as soon as it is committed,
    except the last grapheme cluster: a later token may still add to it (an accent, a joined emoji), and it then takes
    the colour of the token that completes it, so that no code tears a cluster apart. Between two frames the
    cursor rests where settled text ends, and the terminal itself keeps that place over wrapping and resizing:
    a frame erases what is below it, settles, and draws the rest. Room for the rest is made first, so that nothing
    unsettled is ever scrolled away. After a resize, and in a line with many
    characters on whose width terminals disagree, nothing is drawn ahead until the line ends.

    Without `policy.live` settled text is all there is. `show_controls` makes control characters visible.
    `show_rejected` settles rejected text too, in brackets.
    """

    def __init__(
        self,
        stream: TextIO,
        policy: ColorPolicy,
        *,
        show_rejected: bool = False,
        show_controls: bool = True,
        size: Callable[[], tuple[int, int]] | None = None,  # -> (columns, rows)
    ) -> None:
        self._stream = stream
        self._policy = policy
        self._show_rejected = show_rejected
        self._show_controls = show_controls
        self._get_size = size or (lambda: terminal_size(stream))
        self._size = self._get_size()
        self._unicode = can_encode(stream, "␛↵…")
        self._released = Released("kept" if show_rejected else "passing" if policy.live else "no")
        self._unsettled: list[Piece] = []  # committed text that may still change, and the rejected text in flight
        self._at = LINE_START  # where settled text ends
        self._lost = False  # after a resize, until the line ends: the column is unknown
        self._anchored = False  # something is drawn behind the settled text
        self._last: str | None = None  # last character settled; "" before the first, None before the run

    def handle(self, event: Event) -> None:
        self._last = self._last or ""
        released = self._released.take(event)
        if self._show_rejected:
            released = [bracketed(piece, self._unicode) for piece in released]
        self._unsettled = [piece for piece in self._unsettled if not self._is_passing(piece)] + released
        if isinstance(event, Drafted):
            holding = self._released.holding  # a gap would gape between the text and the preview
            self._frame([] if holding else [Piece(token.text, DRAFTED) for token in event.tokens])
        else:
            self._frame(last=isinstance(event, Finished))

    def close(self) -> None:
        """Settle what is left, also of an interrupted run; leave the colours reset and the cursor on a new line."""
        if self._last is None:
            return
        self._unsettled = [piece for piece in self._unsettled if not self._is_passing(piece)] + self._released.rest()
        self._frame(last=True)
        ending = RESET if self._policy.cues else ""
        write(self._stream, ending if self._last == "\n" else ending + "\n")
        self._last = None

    @property
    def _draws_ahead(self) -> bool:
        return self._policy.live and self._size[0] >= MIN_COLUMNS

    def _is_passing(self, piece: Piece) -> bool:
        return piece.role == REJECTED and not self._show_rejected

    def _frame(self, preview: Sequence[Piece] = (), *, last: bool = False) -> None:
        """Erase what was drawn ahead, settle what can be, and draw the rest and the preview ahead."""
        out: list[str] = []
        size = self._get_size()
        if size != self._size:
            self._size, self._lost = size, True
        elif self._anchored:
            out.append(RESTORE_CURSOR)  # a key's echo such as ^C may have moved it
        if self._anchored:
            out.append(ERASE_BELOW)
        out.append(paint(self._shown(self._settle(last)), self._policy))
        can_draw = self._draws_ahead and not last and not self._lost and not self._at.is_vague(size[0])
        ahead = merge_clusters([*self._unsettled, *preview]) if can_draw else []
        drawn = self._draw_ahead(self._shown(ahead))
        self._anchored = bool(drawn)
        write(self._stream, "".join(out) + drawn)

    def _settle(self, last: bool) -> list[Piece]:
        """Take what can be settled out of what is not."""
        characters = merge_clusters(takewhile(lambda piece: not self._is_passing(piece), self._unsettled))
        width = self._size[0]
        ends = [self._at]
        for piece in characters:
            at = ends[-1]
            for shown in self._shown([piece]):
                at = at.after(shown.text, width)
            ends.append(at)
        count = len(characters)
        if self._policy.cues and count and not last:
            count -= 1  # a later token may add to the cluster
        ready, lost = count, False
        while self._draws_ahead and not last and count and ends[count].may_fill_row(width):
            if ends[count].is_vague(width):
                break
            if ready - count == MOST_WAITING:
                count, lost = ready, True
                break
            count -= 1  # the cursor cannot rest behind a full row: moving it would forget that the row is full
        settled = characters[:count]
        self._unsettled = [*characters[count:], *dropwhile(lambda piece: not self._is_passing(piece), self._unsettled)]
        self._at = ends[count]
        if settled:
            self._last = settled[-1].text[-1]
            self._lost = lost or (self._lost and not any(piece.text[-1] == "\n" for piece in settled))
        return settled

    def _draw_ahead(self, pieces: Sequence[Piece]) -> str:
        """What draws the pieces behind the settled text, cut where the screen ends, and leaves the cursor there."""
        width, height = self._size
        at, above, rows = self._at, -(self._at.low // width), 0
        for index, piece in enumerate(pieces):
            if piece.text == "\n":
                above += at.last_row(width) + 1
            at = at.after(piece.text, width)
            rows = above + at.last_row(width)
            if rows > height - 2:  # there must be room for the mark of the cut
                pieces = [*pieces[:index], Piece("…" if self._unicode else ">", DRAFTED)]
                break
        if not pieces or rows >= height:
            return ""
        room = DOWN_SAME_COLUMN * rows + f"\x1b[{rows}A" if rows else ""
        # Saved again for the next frame, since some terminals forget a place once it was restored.
        return room + SAVE_CURSOR + paint(pieces, self._policy) + RESTORE_CURSOR + SAVE_CURSOR

    def _shown(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The characters as the terminal gets them."""
        if not self._show_controls:
            return list(pieces)
        shown: list[Piece] = []
        for piece in pieces:
            if piece.text.isprintable():
                shown.append(piece)
            else:
                shown += [Piece(part, piece.role) for part in clusters(visible(piece.text, self._unicode))]
        return shown


def bracketed(piece: Piece, unicode: bool = True) -> Piece:
    """A rejected piece in brackets, on one line; any other as it is."""
    if piece.role != REJECTED:
        return piece
    text = piece.text.replace("\n", "↵" if unicode else "\\n")
    return Piece(f"[-{text}-]", REJECTED)


def merge_clusters(pieces: Iterable[Piece]) -> list[Piece]:
    """One piece for each grapheme cluster; a cluster of several tokens has the role of the last of them."""
    out: list[Piece] = []
    for _, run in groupby(pieces, key=lambda piece: piece.role == REJECTED):
        group = list(run)
        roles = [piece.role for piece in group for _ in piece.text]
        end = 0
        for cluster in clusters("".join(piece.text for piece in group)):
            end += len(cluster)
            out.append(Piece(cluster, roles[end - 1]))
    return out


def make_renderer(stream: TextIO, policy: ColorPolicy, *, show_rejected: bool = False) -> Sink:
    """The renderer for the stream: plain for a pipe without colours, else one that shows origins.

    A pipe that is coloured (`--color always`) gets the text's own control characters as they are.
    """
    is_tty = stream.isatty()
    if not is_tty and not policy.cues:
        return PlainRenderer(stream)
    return TerminalRenderer(stream, policy, show_rejected=show_rejected, show_controls=is_tty)
