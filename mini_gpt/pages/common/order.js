// Words in an order that the reader changes: by drag, or by the buttons on both sides, which keep the focus.

import { html, useLayoutEffect, useRef, useState } from "./preact.js";

// words: in their order now. ids: of the words, the same before and after a move. onMove(from, to): places.
export function OrderChips({ words, ids, onMove, name = "Order of the words" }) {
  const [dragged, setDragged] = useState(null);
  const pressed = useRef(null);
  const list = useRef();
  useLayoutEffect(() => {
    const [word, side] = pressed.current ?? [];
    const buttons = list.current.querySelectorAll(`.chip[data-word="${word}"] button`);
    pressed.current = null;
    if (buttons.length) (buttons[side].disabled ? buttons[1 - side] : buttons[side]).focus();
  }, [ids]);
  const press = (place, step) => {
    pressed.current = [ids[place], step < 0 ? 0 : 1];
    move(place, place + step);
  };
  const move = (from, to) => {
    if (from !== null && to >= 0 && to < words.length && from !== to) onMove(from, to);
  };
  const over = (event) => {
    if (dragged === null) return;
    const chip = document.elementFromPoint(event.clientX, event.clientY)?.closest(".chip");
    if (chip && +chip.dataset.place !== dragged) {
      move(dragged, +chip.dataset.place);
      setDragged(+chip.dataset.place);
    }
  };
  return html`<ol
    class="chips"
    ref=${list}
    aria-label=${name}
    onPointerMove=${over}
    onPointerUp=${() => setDragged(null)}
    onPointerCancel=${() => setDragged(null)}>
    ${words.map(
      (word, place) =>
        html`<li
          class=${`chip ${dragged === place ? "dragged" : ""}`}
          data-place=${place}
          data-word=${ids[place]}
          key=${ids[place]}>
          <button
            onClick=${() => press(place, -1)}
            disabled=${place === 0}
            aria-label=${`Move ${word}, word ${place + 1}, to the left`}>
            ←
          </button>
          <span
            class="grip"
            onPointerDown=${(event) => {
              event.target.closest("ol").setPointerCapture(event.pointerId);
              setDragged(place);
            }}
            >${word}</span
          >
          <button
            onClick=${() => press(place, 1)}
            disabled=${place === words.length - 1}
            aria-label=${`Move ${word}, word ${place + 1}, to the right`}>
            →
          </button>
        </li>`,
    )}
  </ol>`;
}

// The order after the entry at `from` has moved to `to`.
export function movedOrder(order, from, to) {
  const moved = [...order];
  moved.splice(to, 0, ...moved.splice(from, 1));
  return moved;
}
