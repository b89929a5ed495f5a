-- Schema version 13 to 14: sums of stored rows. schema.sql is applied next and makes their table.
BEGIN IMMEDIATE;
DROP INDEX IF EXISTS stored_rows_by_owner;
PRAGMA user_version = 14;
COMMIT;
