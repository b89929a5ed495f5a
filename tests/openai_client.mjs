// A script for OpenAI's fine-tuning API with its npm package: only `baseURL` is another. `openai_clients.py` runs it.
//
//     node openai_client.mjs BASE_URL MODEL

import assert from "node:assert/strict";
import OpenAI, { BadRequestError, NotFoundError, toFile } from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", adminAPIKey: "none" }); // the second for permissions
const rows = Array.from({ length: 10 }, (_, n) =>
  JSON.stringify({
    messages: [
      { role: "user", content: `What is ${n} times two?` },
      { role: "assistant", content: `${2 * n}.` },
    ],
  }) + "\n",
);
const content = Buffer.from(rows.join(""));

// Files, whole and in parts
const file = await client.files.create({ file: await toFile(content, "rows.jsonl"), purpose: "fine-tune" });
assert.equal(file.status, "processed");
assert.equal(file.bytes, content.length);
const upload = await client.uploads.create({
  bytes: content.length,
  filename: "parts.jsonl",
  mime_type: "text/jsonl",
  purpose: "fine-tune",
});
const part_ids = [];
for (const piece of [content.subarray(0, 300), content.subarray(300)]) {
  const part = await client.uploads.parts.create(upload.id, { data: await toFile(piece, "part") });
  part_ids.push(part.id);
}
const whole = await client.uploads.complete(upload.id, { part_ids });
assert.equal(whole.status, "completed");
const stored = await client.files.content(whole.file.id);
assert.ok(Buffer.from(await stored.arrayBuffer()).equals(content));

// A job, followed to its end
const job = await client.fineTuning.jobs.create({
  model,
  training_file: whole.file.id,
  validation_file: file.id,
  method: { type: "supervised", supervised: { hyperparameters: { n_epochs: 2 } } },
  suffix: "npm",
  seed: 7,
  metadata: { team: "npm" },
});
assert.equal(job.status, "queued");
const seen = new Set();
let status = job.status;
while (!["succeeded", "failed", "cancelled"].includes(status)) {
  await new Promise((resolve) => setTimeout(resolve, 300));
  status = (await client.fineTuning.jobs.retrieve(job.id)).status;
  for await (const event of client.fineTuning.jobs.listEvents(job.id, { limit: 3 })) seen.add(event.id);
}
const ended = await client.fineTuning.jobs.retrieve(job.id);
assert.equal(ended.status, "succeeded", JSON.stringify(ended.error));
assert.equal(ended.fine_tuned_model, `ft:${model}:trl:npm:${job.id}`);
const events = [];
for await (const event of client.fineTuning.jobs.listEvents(job.id)) events.push(event);
assert.equal(new Set(events.map((event) => event.id)).size, events.length);
assert.equal(events[0].message, "The job has successfully completed");
assert.ok(events.some((event) => event.type === "metrics" && "train_loss" in event.data));

// What it has made
const metrics = await (await client.files.content(ended.result_files[0])).text();
assert.match(metrics, /^step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy/);
const checkpoints = [];
for await (const one of client.fineTuning.jobs.checkpoints.list(job.id)) checkpoints.push(one);
assert.equal(checkpoints[0].fine_tuning_job_id, job.id);
const listed = [];
for await (const one of client.fineTuning.jobs.list({ limit: 1 })) listed.push(one.id);
assert.deepEqual(listed, [job.id]);
const chat = await client.chat.completions.create({
  model: ended.fine_tuned_model,
  messages: [{ role: "user", content: "What is 3 times two?" }],
  max_tokens: 4,
});
assert.equal(chat.model, ended.fine_tuned_model);
const permissions = [];
for await (const one of client.fineTuning.checkpoints.permissions.list(ended.fine_tuned_model)) permissions.push(one);
assert.deepEqual(permissions, []);

// Errors have their classes and fields
await assert.rejects(client.fineTuning.jobs.create({ model: "gone", training_file: file.id }), (error) => {
  assert.ok(error instanceof NotFoundError);
  assert.deepEqual([error.param, error.code], ["model", "model_not_found"]);
  return true;
});
await assert.rejects(client.uploads.parts.create(upload.id, { data: await toFile(content, "part") }), BadRequestError);

// A job that is cancelled, and deletions
const other = await client.fineTuning.jobs.create({ model, training_file: file.id });
await client.fineTuning.jobs.cancel(other.id);
assert.equal((await client.models.delete(ended.fine_tuned_model)).deleted, true);
await assert.rejects(client.models.retrieve(ended.fine_tuned_model), NotFoundError);
assert.equal((await client.files.delete(file.id)).deleted, true);
await assert.rejects(client.files.retrieve(file.id), NotFoundError);
console.log(`${seen.size} events seen while it trained, ${events.length} in the end, ${checkpoints.length} checkpoints`);
