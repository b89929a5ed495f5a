// The end of a log on a page, as it grows.

const EVERY_MS = 3000;
// A browser takes seconds to lay out a line of a megabyte.
const LONGEST_LINE = 2000;
const WRITTEN = ["in_progress", "pausing", "cancelling"]; // an attempt that has not begun has no log
const ENDED = ["completed", "failed", "cancelled", "deleted"];

// Shows the text behind an address in an element, until the job has ended. shown: the state of the job when the service
// rendered the element. state(): the present one; null: not known now.
export async function followLog(element, url, shown, state) {
  let wasWritten = WRITTEN.includes(shown);
  for (;;) {
    const now = document.hidden ? null : await state();
    // The state is older than the text: behind the end of a job, the text is the whole.
    if (now && (WRITTEN.includes(now) || wasWritten)) {
      try {
        const answer = await fetch(url);
        if (answer.ok) show(element, await answer.text());
        wasWritten = WRITTEN.includes(now);
      } catch {
        // What reports that the service does not answer is the source of the state.
      }
    }
    if (ENDED.includes(now) && !wasWritten) return;
    await new Promise((next) => setTimeout(next, EVERY_MS));
  }
}

function show(element, text) {
  const wanted = text
    .trimEnd()
    .split("\n")
    .map((line) => (line.length > LONGEST_LINE ? `${line.slice(0, LONGEST_LINE)} ... (the line has ${line.length} characters)` : line))
    .join("\n");
  if (!wanted || wanted === element.textContent) return;
  const view = element.scrollHeight > element.clientHeight ? element : document.scrollingElement;
  const atEnd = view.scrollTop + view.clientHeight >= view.scrollHeight - 20;
  element.textContent = wanted;
  if (atEnd) view.scrollTop = view.scrollHeight;
}
