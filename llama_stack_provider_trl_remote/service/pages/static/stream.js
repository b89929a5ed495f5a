// One stream of events for all jobs of a page. It continues behind the last event after a break, a restart of the
// service, or a time in which the page was hidden. Cursors are as the service writes them: ATTEMPT-BYTES of each job.

const RETRY_MS = 2000;
// A browser opens about six connections to a service: a hidden page leaves its own to others.
const HIDDEN_MS = 10000;

export function isBehind(cursor, other) {
  const [attempt, bytes] = cursor.split("-").map(Number);
  const [otherAttempt, otherBytes] = other.split("-").map(Number);
  return attempt > otherAttempt || (attempt === otherAttempt && bytes > otherBytes);
}

export class Stream {
  // jobs: names. after: cursors to begin behind, or "". on: {event(job, message, cursor), state(job, state), end(), lost()}; a
  // message has the event, and what follows from it: point, superseded_after, eta_seconds.
  constructor(jobs, after, on) {
    this.jobs = jobs;
    this.last = after;
    this.on = on;
    this.ended = false;
    this.timer = 0;
    this.stopping = new AbortController();
    document.addEventListener("visibilitychange", () => this.visible(), { signal: this.stopping.signal });
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    if (this.source || this.ended) return;
    const query = new URLSearchParams(this.jobs.map((job) => ["job", job]));
    if (this.last) query.set("after", this.last);
    const source = (this.source = new EventSource(`/v1/post-training/events?${query}`));
    source.onmessage = (message) => {
      this.last = message.lastEventId;
      const found = JSON.parse(message.data);
      this.on.event(found.job, found, this.last.split("~")[this.jobs.indexOf(found.job)]);
    };
    source.addEventListener("state", (message) => {
      const found = JSON.parse(message.data);
      this.on.state(found.job, found.state);
    });
    source.addEventListener("end", () => {
      this.stop();
      this.on.end?.();
    });
    source.onopen = () => this.on.live?.();
    source.onerror = () => {
      this.on.lost?.();
      // The browser repeats a broken connection by itself, and gives up at an answer that is no stream.
      if (source.readyState === EventSource.CLOSED) {
        this.close();
        this.timer = setTimeout(() => this.open(), RETRY_MS);
      }
    };
  }

  close() {
    this.source?.close();
    this.source = null;
  }

  // For good: a page that is shown again opens what is only closed.
  stop() {
    this.ended = true;
    this.stopping.abort();
    clearTimeout(this.timer);
    this.close();
  }

  visible() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => this.close(), HIDDEN_MS);
    else this.open();
  }
}
