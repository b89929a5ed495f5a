-- Schema version 1 to 2: retries, pauses and the record of every attempt. schema.sql is applied next and creates the view again.
BEGIN IMMEDIATE;
ALTER TABLE jobs ADD COLUMN retries_used INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN not_before REAL NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN resume_from TEXT;
ALTER TABLE attempts ADD COLUMN started_at REAL;
ALTER TABLE attempts ADD COLUMN ended_at REAL;
ALTER TABLE attempts ADD COLUMN reason TEXT;
ALTER TABLE attempts ADD COLUMN message TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN paused_at_step INTEGER;
ALTER TABLE attempts ADD COLUMN start_step INTEGER NOT NULL DEFAULT 0;
DROP VIEW IF EXISTS job_records;
PRAGMA user_version = 2;
COMMIT;
