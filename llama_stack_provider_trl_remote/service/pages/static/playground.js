// Two models beside each other, or one alone: the same prompt to both, their answers as they come, and votes for the
// better one. All texts of models, rows and names become text nodes.

const main = document.getElementById("main");
const form = document.getElementById("playground");
const live = document.getElementById("live");
const voted = document.getElementById("vote-state");
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const WAIT_MS = 500;
const ALONE = "A vote compares two answers: name a model B.";
const SIDES = ["a", "b"].map((name) => ({
  name,
  label: name.toUpperCase(),
  model: element(`model_${name}`),
  pane: element(`turns-${name}`),
  state: element(`state-${name}`),
  turns: [], // of the conversation, without the system prompt
  asked: null, // messages of the last request
  answer: "", // to them
  ended: false, // by itself, and not by a stop or an error
}));
const QUEUE = "GET /v1/post-training/queue"; // what the API names for the page of jobs
let tools = null;
let question = null; // the last one that was sent
let waiting = null; // last turn of a row that the prompt field cannot have: it is shown, and sent where the field is empty
let held = null; // the last one that was waiting
let running = null;
let counting = 0;
let timer = 0;

function element(id) {
  return document.getElementById(id);
}

// The sides that have a model: the second one may have none.
function asked() {
  return SIDES.filter((side) => side.model.value.trim());
}

// --- A conversation

function system() {
  const content = element("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function body(side, messages) {
  const given = { model: side.model.value.trim(), messages, stream: true };
  if (tools) given.tools = tools;
  for (const name of NUMBERS) if (element(name).value !== "") given[name] = Number(element(name).value);
  return given;
}

function post(path, name, value, signal) {
  const fields = { form_token: main.dataset.formToken, [name]: JSON.stringify(value) };
  return fetch(path, { method: "POST", body: new URLSearchParams(fields), signal });
}

async function sentenceOf(answer) {
  if (answer.status === 401) return "The session has ended: log in again in another tab, what is here stays.";
  try {
    const found = await answer.json();
    return found.error?.message ?? found.detail;
  } catch {
    return `The service answered with ${answer.status}.`;
  }
}

function showState(side, sentence, name = "steps") {
  side.state.className = name;
  side.state.textContent = sentence;
}

// A sentence of the service; where it names the queue of the API, a link to the page of jobs.
function showProblem(side, sentence) {
  const [before, after] = sentence.split(QUEUE);
  showState(side, before, "problem");
  if (after === undefined) return;
  const link = document.createElement("a");
  link.href = "/";
  link.textContent = "Jobs";
  side.state.append(link, after);
}

// A browser's own errors have other words in each browser, such as "Failed to fetch".
function sentenceOfError(error, answer) {
  if (!(error instanceof TypeError)) return error.message;
  return answer ? "The answer broke off: retry it." : "The service does not answer: retry it.";
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function show(side, role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const title = document.createElement("h3");
  title.textContent = { user: "Prompt", assistant: "Answer", tool: "Result of a tool" }[role] ?? role;
  const content = document.createElement("div");
  content.className = "text";
  const node = document.createTextNode(text);
  content.append(node);
  turn.append(title, content);
  side.pane.append(turn);
  side.pane.scrollTop = side.pane.scrollHeight;
  return node;
}

// The text of a turn; calls of tools as JSON behind it.
function textOf(turn) {
  const content = typeof turn.content === "string" ? turn.content : JSON.stringify(turn.content ?? "");
  const calls = turn.tool_calls?.length ? JSON.stringify(turn.tool_calls, null, 2) : "";
  return [content === '""' ? "" : content, calls].filter(Boolean).join("\n");
}

function hideLastTurn(side) {
  while (side.pane.childElementCount > side.before.shown) side.pane.lastElementChild.remove();
}

async function ask(side, signal) {
  // What was not answered is no part of the conversation: it would look as if the model had read it.
  if (side.asked && !side.answer) hideLastTurn(side);
  side.asked = [...system(), ...side.turns, question];
  side.answer = "";
  side.ended = false;
  showState(side, "");
  // A turn that waits is shown already, and is hidden with its answer.
  side.before = { turns: side.turns, shown: side.pane.childElementCount - (question === held ? 1 : 0) };
  if (question !== held) show(side, question.role, textOf(question));
  const node = show(side, "assistant", "");
  try {
    const answer = await post("/playground/answers", "request", body(side, side.asked), signal);
    if (!answer.ok) throw new Error(await sentenceOf(answer));
    let reason = null;
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      const text = choice?.delta.content ?? "";
      side.answer += text;
      node.appendData(text);
      side.pane.scrollTop = side.pane.scrollHeight;
      reason = choice?.finish_reason ?? reason;
    }
    if (!reason) throw new Error("The answer broke off: retry it.");
    side.ended = true;
    if (reason === "length") showState(side, "It ended at its limit of tokens.");
  } catch (error) {
    if (!side.answer) side.pane.lastElementChild.remove();
    if (signal.aborted) showState(side, "Stopped.");
    else showProblem(side, sentenceOfError(error, side.answer));
  }
  if (side.answer) side.turns = [...side.turns, question, { role: "assistant", content: side.answer }];
}

async function askBoth() {
  running = new AbortController();
  const sides = asked();
  live.textContent = sides.length > 1 ? "The models answer ..." : "The model answers ...";
  voted.textContent = "";
  update();
  await Promise.all(sides.map((side) => ask(side, running.signal)));
  running = null;
  const failed = sides.filter((side) => !side.ended).map((side) => side.label);
  live.textContent = failed.length ? `No whole answer of ${failed.join(" and ")}.` : `${sides.length > 1 ? "Both models have" : "The model has"} answered.`;
  update();
}

function send() {
  const content = element("prompt").value.trim();
  if (running || !form.reportValidity()) return;
  if (!content && !waiting) {
    live.textContent = "There is nothing to send: write a prompt, or take a row's prompt.";
    return element("prompt").focus();
  }
  if (content && waiting) for (const side of SIDES) side.turns = [...side.turns, waiting];
  question = content ? { role: "user", content } : waiting;
  waiting = null;
  element("prompt").value = "";
  askBoth();
}

function retry() {
  for (const side of asked().filter((one) => one.before)) {
    side.turns = side.before.turns;
    hideLastTurn(side);
  }
  held = null; // hidden with the rest: it is shown again
  askBoth();
}

function begin(turns = []) {
  question = waiting = held = null;
  for (const side of SIDES) {
    side.turns = turns;
    side.asked = null;
    side.answer = "";
    showState(side, "");
    side.ended = false;
    side.pane.replaceChildren();
    for (const turn of turns) show(side, turn.role, textOf(turn));
  }
  voted.textContent = "";
  update();
}

function update() {
  const [a, b] = SIDES;
  const isAlone = !b.model.value.trim();
  const answered = a.ended && b.ended && !running && !isAlone;
  const same = answered && JSON.stringify(a.asked) === JSON.stringify(b.asked);
  const votable = same && a.answer.trim() && b.answer.trim() && a.answer !== b.answer;
  for (const side of SIDES) allow(`vote-${side.name}`, votable);
  if (isAlone) voted.textContent = ALONE;
  else if (voted.textContent === ALONE) voted.textContent = "";
  if (answered && !same) voted.textContent = "The conversations differ: a vote needs the same messages before both answers. Vote after each answer, or begin a new conversation.";
  else if (answered && a.answer === b.answer) voted.textContent = "The answers are the same: there is nothing to vote for.";
  else if (answered && !(a.answer.trim() && b.answer.trim())) voted.textContent = "An answer is empty: DPO cannot train on it.";
  for (const id of ["send", "next", "clear"]) allow(id, !running);
  allow("stop", running);
  allow("retry", !running && question);
}

// Not by `disabled`, which takes the focus away from who uses the keyboard.
function allow(id, allowed) {
  element(id).setAttribute("aria-disabled", String(!allowed));
}

function onClick(id, action) {
  element(id).addEventListener("click", () => element(id).ariaDisabled === "true" || action());
}

// --- Rows

async function next() {
  const dataset = element("dataset").value.trim();
  const row = Number(element("row").value || 0);
  if (!dataset) {
    live.textContent = "Name a dataset: its rows have the prompts.";
    return element("dataset").focus();
  }
  const query = new URLSearchParams({ dataset, row });
  if (main.dataset.job) query.set("job", main.dataset.job);
  try {
    const answer = await fetch(`/playground/prompt?${query}`);
    if (!answer.ok) {
      live.textContent = await sentenceOf(answer);
      return;
    }
    const found = await answer.json();
    if (running) return;
    tools = found.tools;
    const first = found.messages[0]?.role === "system" ? found.messages.shift() : null;
    const last = found.messages.pop() ?? null;
    const isText = last?.role === "user" && typeof last.content === "string";
    element("system").value = first?.content ?? "";
    begin(found.messages);
    element("prompt").value = isText ? last.content : "";
    if (last && !isText) {
      waiting = held = last;
      for (const side of SIDES) show(side, last.role, textOf(last));
    }
    element("row").value = row + 1;
    const what = `The prompt of row ${row}${tools ? ", with its tools" : ""}`;
    if (!last) live.textContent = `${what} has no turn to answer: write a prompt.`;
    else live.textContent = isText ? `${what}: send it.` : `${what} ends in a turn of ${last.role}: send it as it is.`;
    element("prompt").focus();
  } catch {
    live.textContent = "The service does not answer.";
  }
}

// --- Votes

async function vote(better) {
  const other = SIDES.find((side) => side !== better);
  const given = {
    dataset_id: element("votes").value.trim(),
    messages: better.asked,
    chosen: better.answer,
    rejected: other.answer,
  };
  if (tools) given.tools = tools;
  for (const side of SIDES) allow(`vote-${side.name}`, false);
  try {
    const answer = await post("/playground/votes", "vote", given);
    if (!answer.ok) throw new Error(await sentenceOf(answer));
    // Both continue with it, so that the next answers follow the same messages.
    other.turns = better.turns;
    showState(other, `The conversation continues with the answer of ${better.label}.`);
    for (const side of SIDES) side.ended = false;
    voted.textContent = `Stored: ${better.label} is better.`;
    await count();
  } catch (error) {
    update();
    voted.textContent = error instanceof TypeError ? "The service does not answer: vote again." : error.message;
  }
}

// How many votes the dataset has: of several requests the last one counts.
async function count() {
  const dataset = element("votes").value.trim();
  const number = (counting += 1);
  const shown = element("count");
  const link = element("train");
  link.hidden = true;
  shown.textContent = "";
  if (!dataset) return;
  const query = new URLSearchParams({ dataset, model: asked().at(-1)?.model.value.trim() ?? "" });
  try {
    const answer = await fetch(`/playground/votes?${query}`);
    const found = answer.ok ? await answer.json() : null;
    if (number !== counting) return;
    if (!found) shown.textContent = await sentenceOf(answer);
    else if (!found.votes) shown.textContent = "It has no votes yet.";
    else {
      shown.textContent = `It has ${found.votes} ${found.votes === 1 ? "vote" : "votes"}.`;
      link.setAttribute("href", found.train);
      link.hidden = false;
    }
  } catch {
    shown.textContent = "The service does not answer.";
  }
}

function countSoon() {
  clearTimeout(timer);
  timer = setTimeout(count, WAIT_MS);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    send();
  }
});
onClick("stop", () => running.abort());
onClick("retry", retry);
onClick("clear", () => {
  tools = null;
  begin();
  live.textContent = "";
});
onClick("next", next);
for (const side of SIDES) onClick(`vote-${side.name}`, () => vote(side));
element("model_b").addEventListener("input", update);
for (const id of ["votes", "model_b"]) element(id).addEventListener("input", countSoon);
element("dataset").addEventListener("input", () => (element("row").value = 0));
update();
// Without this script a click would leave the page, and what was typed.
for (const id of ["send", "next"]) element(id).disabled = false;
count();
