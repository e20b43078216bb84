"use strict";
// A page that is served while its hunt runs: what changed is put in the place
// of what was there, and the reader's place, what is open and what has the
// focus stay.
(() => {
  const now = document.getElementById("now");
  const served = new Map(); // each part as it came, before the reader opened anything in it
  for (const part of parts(document)) served.set(part.id, part.outerHTML);
  let waiting = null; // a page that came while the reader marked text

  function parts(page) {
    return page.querySelectorAll("body > header, main > section");
  }

  function key(details) {
    return details.id || details.firstElementChild.textContent;
  }

  // where the reader is: the first thing with a name that is still in view.
  function place() {
    for (const e of document.querySelectorAll("main [id]")) {
      const box = e.getBoundingClientRect();
      if (box.bottom > 0 && box.height > 0) return { id: e.id, top: box.top };
    }
    return null;
  }

  function marking(part) {
    const s = getSelection();
    return !s.isCollapsed && s.containsNode(part, true);
  }

  function replace(old, part) {
    const open = new Set();
    for (const d of old.querySelectorAll("details[open]")) open.add(key(d));
    const shut = new Set();
    for (const d of old.querySelectorAll("details:not([open])")) shut.add(key(d));
    for (const d of part.querySelectorAll("details")) {
      if (open.has(key(d))) d.open = true;
      else if (shut.has(key(d))) d.open = false;
    }
    const reachable = "a[href], summary, [tabindex]";
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const nth = focused ? [...old.querySelectorAll(reachable)].filter((e) => e.textContent === focused.textContent).indexOf(focused) : -1;
    old.replaceWith(part);
    if (focused && nth >= 0) {
      const same = [...part.querySelectorAll(reachable)].filter((e) => e.textContent === focused.textContent)[nth];
      if (same) same.focus({ preventScroll: true });
    }
  }

  function take(text) {
    const next = new DOMParser().parseFromString(text, "text/html");
    const at = place();
    waiting = null;
    document.title = next.title;
    const main = document.getElementById("main");
    const names = new Set();
    let before = null; // the part that the next one comes after
    for (const part of parts(next)) {
      names.add(part.id);
      const old = document.getElementById(part.id);
      const html = part.outerHTML;
      if (!old) {
        if (before) before.after(document.adoptNode(part));
        else main.prepend(document.adoptNode(part));
      } else if (served.get(part.id) !== html) {
        if (marking(old)) {
          waiting = text;
          if (part.id !== "top") before = old;
          continue;
        }
        replace(old, document.adoptNode(part));
      }
      served.set(part.id, html);
      if (part.id !== "top") before = document.getElementById(part.id);
    }
    for (const old of parts(document)) {
      if (!names.has(old.id) && !marking(old)) old.remove();
    }
    const same = at && document.getElementById(at.id);
    if (same) scrollBy(0, same.getBoundingClientRect().top - at.top);
  }

  document.addEventListener("selectionchange", () => {
    if (waiting && getSelection().isCollapsed) take(waiting);
  });

  const source = new EventSource("events");
  source.addEventListener("now", (e) => { now.textContent = JSON.parse(e.data); });
  source.addEventListener("page", (e) => take(JSON.parse(e.data)));
  source.addEventListener("end", (e) => {
    source.close();
    now.textContent = JSON.parse(e.data);
  });
  source.addEventListener("error", () => {
    now.textContent = "culprit doesn't answer: it has ended or was stopped. What is here is as it was last.";
  });
})();
