-- Schema version 6 to 7: the table exports, which schema.sql creates next.
BEGIN IMMEDIATE;
PRAGMA user_version = 7;
COMMIT;
