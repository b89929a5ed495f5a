// The parts of a page that the service renders, as it renders them now.

const WAIT_MS = 500;
const RETRY_MS = 2000;

export class Parts {
  // ids: of the elements. on: {replaced(page), failed()}.
  constructor(ids, on = {}) {
    this.ids = ids;
    this.on = on;
    this.timer = 0;
    this.asked = 0;
    this.shown = 0;
  }

  // Calls within a moment are one request: several jobs change at once when one ends.
  refresh(wait = WAIT_MS) {
    this.timer ||= setTimeout(() => this.fetch(), wait);
  }

  // For a page without a stream, while it is looked at.
  every(milliseconds) {
    setInterval(() => document.hidden || this.refresh(), milliseconds);
  }

  async fetch() {
    this.timer = 0;
    const asked = (this.asked += 1);
    try {
      const answer = await fetch(location.href);
      if (answer.status === 401) return location.reload();
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (asked < this.shown) return; // a later one has been faster
      this.shown = asked;
      for (const id of this.ids) replacePart(document.getElementById(id), page.getElementById(id));
      this.on.replaced?.(page);
    } catch {
      this.on.failed?.();
      this.refresh(RETRY_MS);
    }
  }
}

const REACHED_BY_KEYS = "a, button, input, select, summary, textarea, [tabindex]";

// Who uses the keyboard stays where they are, what was ticked stays ticked, and what was opened stays open.
export function replacePart(old, part) {
  if (!old || !part || old.isEqualNode(part)) return;
  const before = [...old.querySelectorAll(REACHED_BY_KEYS)];
  const at = before.indexOf(document.activeElement);
  for (const box of old.querySelectorAll("input[type=checkbox]:checked")) {
    const same = part.querySelector(`input[name="${CSS.escape(box.name)}"][value="${CSS.escape(box.value)}"]`);
    if (same) same.checked = true;
  }
  const opened = [...old.querySelectorAll("details")].map(({ open }) => open);
  [...part.querySelectorAll("details")].forEach((one, place) => (one.open ||= opened[place] ?? false));
  old.replaceWith(part);
  const found = [...part.querySelectorAll(REACHED_BY_KEYS)][at];
  if (at >= 0 && found?.tagName === before[at].tagName) found.focus({ preventScroll: true });
}
