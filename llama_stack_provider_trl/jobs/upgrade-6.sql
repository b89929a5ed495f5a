-- Schema version 6 to 7: totals, which begin with what the jobs that exist have done. schema.sql is applied next and makes
-- their triggers, the view, and the table of exports.
BEGIN IMMEDIATE;
DROP VIEW IF EXISTS job_records;
ALTER TABLE jobs ADD COLUMN tokens INTEGER NOT NULL DEFAULT 0;
UPDATE jobs SET tokens = coalesce(
    (SELECT max(json_extract(progress, '$.tokens_seen')) FROM attempts WHERE attempts.job_uuid = jobs.job_uuid), 0);
CREATE TABLE totals (
    name TEXT NOT NULL,
    labels TEXT NOT NULL,
    value REAL NOT NULL,
    PRIMARY KEY (name, labels)
) STRICT, WITHOUT ROWID;
WITH known AS (
    SELECT *, CASE WHEN json_valid(spec) THEN coalesce(json_extract(spec, '$.algorithm'), '') ELSE '' END AS algorithm FROM jobs)
INSERT INTO totals
SELECT 'jobs_finished',
       json_array(algorithm, state, CASE state WHEN 'failed' THEN coalesce(reason, '') ELSE '' END) AS labels, count(*)
FROM known WHERE state IN ('completed', 'failed', 'cancelled') GROUP BY labels
UNION ALL
SELECT 'tokens', json_array(algorithm) AS labels, sum(tokens) FROM known GROUP BY labels HAVING sum(tokens) > 0
UNION ALL
SELECT 'attempts_ended',
       json_array(coalesce(attempts.reason, CASE WHEN attempts.attempt = jobs.attempt AND state <> 'scheduled' THEN state
                                                 ELSE 'moved' END)) AS labels, count(*)
FROM attempts JOIN jobs USING (job_uuid) WHERE ended_at IS NOT NULL GROUP BY labels;
PRAGMA user_version = 7;
COMMIT;
