-- Schema version 4 to 5: credentials of nodes, tokens that are created while the service runs, and who created a job.
-- schema.sql is applied next and makes their tables, and the view.
BEGIN IMMEDIATE;
ALTER TABLE jobs ADD COLUMN created_by TEXT NOT NULL DEFAULT '';
DROP VIEW IF EXISTS job_records;
PRAGMA user_version = 5;
COMMIT;
