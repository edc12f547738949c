// The frame around a conversation: the two side panels, which lie over the page on narrow screens, and the colours.

import { byId } from "./dom.js";

const PANELS = {
  list: { toggle: "list-toggle", fixed: matchMedia("(min-width: 60rem)") },
  settings: { toggle: "settings-toggle", fixed: matchMedia("(min-width: 76rem)") },
};
/** On wide screens a panel stands beside the text; its button then hides and shows it. */

export function setUpShell() {
  for (const [id, { toggle, fixed }] of Object.entries(PANELS)) {
    byId(toggle).addEventListener("click", () => setOpen(id, !isOpen(id)));
    fixed.addEventListener("change", () => setOpen(id, fixed.matches, { focus: false }));
    setOpen(id, fixed.matches, { focus: false });
  }
  for (const button of document.querySelectorAll("[data-closes]"))
    button.addEventListener("click", () => setOpen(button.dataset.closes, false));
  byId("veil").addEventListener("click", closeOverlays);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeOverlays();
  });
}

export function isOpen(id) {
  return byId(id).dataset.open === "true";
}

/** Open or close a panel. One that lies over the page takes the focus, and gives it back when it closes. */
export function setOpen(id, open, { focus = true } = {}) {
  const { toggle, fixed } = PANELS[id];
  if (open && !fixed.matches) for (const other of Object.keys(PANELS)) if (other !== id && over(other)) setOpen(other, false, { focus: false });
  const panel = byId(id);
  panel.dataset.open = String(open);
  panel.inert = !open;
  byId(toggle).setAttribute("aria-expanded", String(open));
  const covered = Object.keys(PANELS).some(over);
  byId("veil").hidden = !covered;
  for (const part of [byId("main"), document.querySelector(".bar")]) part.inert = covered;
  if (!focus || fixed.matches) return;
  if (open) panel.querySelector("button, input")?.focus();
  else byId(toggle).focus();
}

function over(id) {
  return isOpen(id) && !PANELS[id].fixed.matches;
}

/** Close what lies over the page. */
export function closeOverlays() {
  for (const id of Object.keys(PANELS)) if (over(id)) setOpen(id, false);
}

/** theme: "light", "dark" or "" for what the system has. */
export function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
