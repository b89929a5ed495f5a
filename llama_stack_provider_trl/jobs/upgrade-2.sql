-- Schema version 2 to 3: columns for the request of every job. A spec that cannot be read leaves its job the defaults.
BEGIN IMMEDIATE;
ALTER TABLE jobs ADD COLUMN wanted_device TEXT NOT NULL DEFAULT 'auto';
ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN ranks INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN checkpoint_dir TEXT NOT NULL DEFAULT '';
UPDATE jobs
SET wanted_device = coalesce(json_extract(spec, '$.device'), wanted_device),
    priority = coalesce(json_extract(spec, '$.priority'), priority),
    ranks = coalesce(json_extract(spec, '$.ranks'), ranks),
    checkpoint_dir = coalesce(json_extract(spec, '$.checkpoint_dir'), checkpoint_dir)
WHERE json_valid(spec);
PRAGMA user_version = 3;
COMMIT;
