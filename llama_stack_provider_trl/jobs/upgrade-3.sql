-- Schema version 3 to 4: what a job asks of the nodes that it runs on. schema.sql is applied next and makes the tables of
-- nodes and tasks.
BEGIN IMMEDIATE;
ALTER TABLE jobs ADD COLUMN demand TEXT NOT NULL DEFAULT '';
DROP VIEW IF EXISTS job_records;
PRAGMA user_version = 4;
COMMIT;
