-- Schema version 10 to 11: jobs that wait for others. schema.sql is applied next and makes their table, and the view.
BEGIN IMMEDIATE;
DROP VIEW IF EXISTS job_records;
ALTER TABLE jobs ADD COLUMN blocked INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 11;
COMMIT;
