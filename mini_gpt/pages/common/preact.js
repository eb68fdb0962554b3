"use strict";
// The vendored library's names, once for all scripts of a page.
const { html, render, useState, useEffect, useLayoutEffect, useMemo, useRef } = htmPreact;
