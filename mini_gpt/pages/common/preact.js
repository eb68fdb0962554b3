import "./vendor/htm-preact-3.1.1.js";

// The vendored library's names, once for all scripts of a page.
export const { html, render, useState, useEffect, useLayoutEffect, useMemo, useRef } = htmPreact;
