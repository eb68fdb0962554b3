"use strict";
// Tabs, groups of buttons, sliders and shortcuts, as screen readers and keyboards expect them.

// tabs: [[id, name]]. The arrow keys, Home and End go from tab to tab.
function Tabs({ tabs, selected, onSelect, name }) {
  const list = useRef();
  useLayoutEffect(() => {
    // on a narrow screen the selected tab comes into view
    const { offsetLeft: from, clientWidth: width } = list.current;
    const tab = document.getElementById(`tab-${selected}`);
    list.current.scrollLeft = tab.offsetLeft - from - (width - tab.offsetWidth) / 2;
  }, [selected]);
  const press = (event) => {
    const at = tabs.findIndex(([id]) => id === selected);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const [id] = tabs[(to + tabs.length) % tabs.length];
    onSelect(id);
    document.getElementById(`tab-${id}`).focus();
  };
  return html`<div role="tablist" ref=${list} aria-label=${name} onKeyDown=${press}>
    ${tabs.map(
      ([id, said]) =>
        html`<button
          role="tab"
          id=${`tab-${id}`}
          aria-selected=${id === selected ? "true" : "false"}
          aria-controls="panel"
          tabindex=${id === selected ? 0 : -1}
          onClick=${() => onSelect(id)}>
          ${said}
        </button>`,
    )}
  </div>`;
}

// The panel of the selected tab.
const TabPanel = ({ selected, children }) =>
  html`<div role="tabpanel" id="panel" aria-labelledby=${`tab-${selected}`} tabindex="-1">${children}</div>`;

// Buttons of which one is pressed. options: [[value, text]]. Buttons have the ids `${id}-${value}`.
const Choice = ({ id, name, options, value, onChoose, titleOf }) =>
  html`<div class="choice" role="group" aria-label=${name}>
    <span class="name" aria-hidden="true">${name}</span>
    ${options.map(
      ([own, text]) =>
        html`<button
          id=${`${id}-${own}`}
          aria-pressed=${own === value ? "true" : "false"}
          title=${titleOf?.(own)}
          onClick=${() => onChoose(own)}>
          ${text}
        </button>`,
    )}
  </div>`;

const Slider = ({ id, name, min, max, step, value, said, title, onChange }) =>
  html`<label title=${title}
    ><span class="soft">${name}</span>
    <input
      type="range"
      id=${id}
      min=${min}
      max=${max}
      step=${step}
      value=${value}
      onInput=${(event) => onChange(+event.target.value)} />${" "}
    <b class="numbers" id=${`${id}-value`}>${said ?? value}</b></label
  >`;

const isTyping = (element) => /^(INPUT|SELECT|TEXTAREA)$/.test(element.tagName) || element.isContentEditable;

// A hook: keys is {key: action}. Shortcuts are off while typing, with Ctrl, Alt or Meta, and if `on` is false.
function useShortcuts(keys, on) {
  const latest = useRef();
  latest.current = on ? keys : {};
  useEffect(() => {
    const press = (event) => {
      if (
        event.ctrlKey ||
        event.metaKey ||
        event.altKey ||
        isTyping(event.target) ||
        !Object.hasOwn(latest.current, event.key)
      )
        return;
      event.preventDefault();
      latest.current[event.key]();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
