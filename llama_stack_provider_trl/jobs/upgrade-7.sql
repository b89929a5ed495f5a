-- Schema version 7 to 8: the table of samples, which schema.sql makes next.
BEGIN IMMEDIATE;
PRAGMA user_version = 8;
COMMIT;
