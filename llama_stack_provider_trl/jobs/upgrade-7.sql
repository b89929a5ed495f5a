-- Schema version 7 to 8: where in its training a job reported a warning. Of the warnings that exist this is not known.
BEGIN IMMEDIATE;
ALTER TABLE warnings ADD COLUMN step INTEGER;
PRAGMA user_version = 8;
COMMIT;
