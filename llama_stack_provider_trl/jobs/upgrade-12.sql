-- Schema version 12 to 13: owners of stored rows. schema.sql is applied next and makes their table.
BEGIN IMMEDIATE;
PRAGMA user_version = 13;
COMMIT;
