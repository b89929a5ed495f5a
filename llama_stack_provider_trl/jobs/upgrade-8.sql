-- Schema version 8 to 9: the table of samples, which schema.sql makes next.
BEGIN IMMEDIATE;
PRAGMA user_version = 9;
COMMIT;
