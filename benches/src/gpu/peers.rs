//! Times of other programs on the same machine, one JSON object a line.

use flash_sampling_cli::bench::record::Entry;
use flash_sampling_cli::error::CommandError;
use serde::Deserialize;
use std::path::Path;

/// The times in a file of other programs.
#[derive(Clone, Debug)]
pub struct Peers {
    /// The file's name.
    pub source: String,
    cells: Vec<Cell>,
}

/// The times of one program on one head and batch, in microseconds.
#[derive(Clone, Debug, Deserialize)]
struct Cell {
    #[serde(rename = "V")]
    vocab: usize,
    #[serde(rename = "D")]
    hidden: usize,
    #[serde(rename = "B")]
    rows: usize,
    peer: String,
    min_us: f64,
    med_us: f64,
}

impl Peers {
    /// Reads a file. Skips lines that are not objects or lack a field (ceilings, failures).
    ///
    /// # Errors
    /// A file that cannot be read, or has no times.
    pub fn read(path: &Path) -> Result<Self, CommandError> {
        let name = path.display();
        let bytes = std::fs::read(path)
            .map_err(|error| CommandError::usage(format!("the peers' times in {name} cannot be read: {error}")))?;
        let cells = parse(&String::from_utf8_lossy(&bytes));
        if cells.is_empty() {
            return Err(CommandError::usage(format!("{name} holds no times of peers")));
        }
        let source = path.file_name().map_or_else(|| name.to_string(), |name| name.to_string_lossy().into_owned());
        Ok(Peers { source, cells })
    }

    /// The times for a head and batch, in the order of the file.
    pub fn of(&self, vocab: usize, hidden: usize, rows: usize) -> Vec<Entry> {
        let here = |cell: &&Cell| (cell.vocab, cell.hidden, cell.rows) == (vocab, hidden, rows);
        let entry = |cell: &Cell| Entry {
            name: cell.peer.clone(),
            best: cell.min_us * 1e-6,
            median: cell.med_us * 1e-6,
            passes: None,
        };
        self.cells.iter().filter(here).map(entry).collect()
    }
}

fn parse(text: &str) -> Vec<Cell> {
    let usable = |cell: &Cell| cell.min_us > 0.0 && cell.min_us <= cell.med_us;
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(usable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_found_and_other_lines_passed_over() {
        let text = concat!(
            "Supports warp specialization: True\n",
            "{\"peer\": \"copy\", \"gb_s\": 4241.4}\n",
            "{\"V\": 128, \"D\": 64, \"B\": 2, \"peer\": \"triton\", \"min_us\": 12.5, \"med_us\": 13.0, \"p90_us\": 14}\n",
            "{\"V\": 128, \"D\": 64, \"B\": 2, \"peer\": \"broken\", \"error\": \"x\"}\n",
            "{\"V\": 128, \"D\": 64, \"B\": 4, \"peer\": \"triton\", \"min_us\": -1, \"med_us\": 13.0}\n",
        );
        let peers = Peers { source: String::new(), cells: parse(text) };
        let found = peers.of(128, 64, 2);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].best, found[0].median), ("triton", 12.5 * 1e-6, 13.0 * 1e-6));
        assert!(peers.of(128, 64, 4).is_empty() && peers.of(64, 128, 2).is_empty());
    }
}
