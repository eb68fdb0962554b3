"""Plain text: a file is a document, or several with a separator between them."""

import codecs
import io

from mini_gpt.data import text_files
from mini_gpt.data.corpus import Piece
from mini_gpt.data.formats.records import LEAVE_OUT, Parts
from mini_gpt.data.simple_tokenizers import BEFORE_SPACE
from mini_gpt.runtime.errors import UserError

LINE_ENDS = "\r\n"
CHUNK = 2**22  # bytes that are read at a time
LONGEST_PIECE = 2**22  # characters; a longer document comes in pieces, each of which ends before a space


def read(stream: io.BufferedReader, where: str, separator: str | None) -> Parts:
    """Yield the documents of a file. Line ends next to a separator are left out.

    Raises UserError if the file is not text, or has a zero byte or bytes that are not UTF-8.
    """
    text, is_new, offset, decoder = "", True, 0, codecs.getincrementaldecoder("utf-8")()
    while True:
        raw = stream.read(CHUNK)
        if offset == 0:
            text_files.refuse_binary(raw, where)
        pending = len(decoder.getstate()[0])  # bytes of a character that the last chunk has cut
        try:
            new = decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            at = offset - pending + error.start
            found = f"found byte 0x{error.object[error.start]:02x} at offset {at:,}, which is not UTF-8"
            raise UserError(f"{where}: {found}; {text_files.to_utf8(error.object, error.start)}") from None
        if "\0" in new:
            raise UserError(f"{where}: found a zero byte; remove them: tr -d '\\0' < FILE > NEW, or {LEAVE_OUT}")
        text += new.removeprefix(text_files.BYTE_ORDER_MARK) if offset == 0 else new
        offset += len(raw)
        if separator is not None:
            *whole, text = text.split(separator)
            for document in whole:
                yield Piece((document.lstrip(LINE_ENDS) if is_new else document).rstrip(LINE_ENDS), is_new)
                is_new = True
            if is_new and (not raw or len(text) > 2 * LONGEST_PIECE):  # not before: a separator may begin with them
                text = text.lstrip(LINE_ENDS)
        if not raw:
            yield Piece(text, is_new)
            return
        while len(text) > 2 * LONGEST_PIECE:
            space = BEFORE_SPACE.search(text, LONGEST_PIECE, 2 * LONGEST_PIECE - len(separator or ""))
            end = space.end() if space else LONGEST_PIECE
            yield Piece(text[:end], is_new)
            text, is_new = text[end:], False
