-- Schema version 9 to 10: the table of allocations, which schema.sql makes next.
BEGIN IMMEDIATE;
PRAGMA user_version = 10;
COMMIT;
