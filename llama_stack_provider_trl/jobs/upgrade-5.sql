-- Schema version 5 to 6: one column for what the status shows of the last metric point. schema.sql is applied next and
-- makes the view again. `!.17g` keeps every bit of a number; json_object alone keeps 15 digits. Infinity has no JSON.
BEGIN IMMEDIATE;
DROP VIEW IF EXISTS job_records;
ALTER TABLE attempts ADD COLUMN progress TEXT NOT NULL DEFAULT '{}';
UPDATE attempts SET progress = json_patch('{}', json_object(
    'epoch', CASE WHEN abs(epoch) < 9e999 THEN json(printf('%!.17g', epoch)) END,
    'loss', CASE WHEN abs(loss) < 9e999 THEN json(printf('%!.17g', loss)) END,
    'tokens_per_second', CASE WHEN abs(tokens_per_second) < 9e999 THEN json(printf('%!.17g', tokens_per_second)) END,
    'peak_memory_bytes', peak_memory_bytes));
ALTER TABLE attempts DROP COLUMN epoch;
ALTER TABLE attempts DROP COLUMN loss;
ALTER TABLE attempts DROP COLUMN tokens_per_second;
ALTER TABLE attempts DROP COLUMN peak_memory_bytes;
PRAGMA user_version = 6;
COMMIT;
