//! The header of a `.npy` file (numpy's format 1.0 to 3.0).
//!
//! The header is a Python dictionary. For a plain array, it differs from JSON only in quotes, brackets, booleans and
//! trailing commas.

use crate::input::Problem;
use serde::Deserialize;

/// numpy refuses longer headers too.
const MAX_HEADER: usize = 10_000;

/// The dictionary of a header.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Dictionary {
    descr: String,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// The content of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpyHeader {
    /// numpy's type string, such as `<f4`.
    pub descr: String,
    /// Whether the first index runs fastest.
    pub fortran_order: bool,
    /// The shape.
    pub shape: Vec<usize>,
    /// Offset of the data in bytes.
    pub data: usize,
}

/// The first bytes of every `.npy` file.
pub const MAGIC: &[u8] = b"\x93NUMPY";

fn invalid(reason: impl Into<String>) -> Problem {
    Problem::Format { format: ".npy", reason: reason.into() }
}

impl NpyHeader {
    /// Parses the header at the start of `bytes`.
    ///
    /// # Errors
    /// [`Problem::Format`], or [`Problem::Truncated`] when the file ends within the header.
    pub fn parse(bytes: &[u8]) -> Result<Self, Problem> {
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| invalid("it does not begin with the magic string"))?;
        let truncated = || Problem::Truncated("it ends within the header".into());
        let (length, text) = match rest {
            [1, 0, a, b, rest @ ..] => (usize::from(u16::from_le_bytes([*a, *b])), rest),
            [2 | 3, 0, a, b, c, d, rest @ ..] => (u32::from_le_bytes([*a, *b, *c, *d]) as usize, rest),
            [1..=3, 0, ..] | [] | [_] => return Err(truncated()),
            [major, minor, ..] => return Err(invalid(format!("version {major}.{minor}"))),
        };
        if length > MAX_HEADER {
            return Err(invalid(format!("a header of {length} bytes")));
        }
        let data = bytes.len() - text.len() + length;
        let text = text.get(..length).ok_or_else(truncated)?;
        let text = str::from_utf8(text).map_err(|_| invalid("the header is not UTF-8"))?;
        let broken = |error| invalid(format!("cannot read the header as JSON: {error}"));
        let Dictionary { descr, fortran_order, shape } = serde_json::from_str(&json(text)).map_err(broken)?;
        Ok(NpyHeader { descr, fortran_order, shape, data })
    }

    /// The array's bytes in C order, for a type string of `descrs`.
    ///
    /// # Errors
    /// [`Problem::DType`], [`Problem::Shape`] for an array in Fortran order, or [`Problem::Truncated`] for a file of
    /// another length.
    pub fn data_as<'a, T: Copy>(
        &self,
        bytes: &'a [u8],
        descrs: &[(&str, usize, T)],
        expected: &'static str,
    ) -> Result<(T, &'a [u8]), Problem> {
        let found = descrs.iter().find(|(descr, ..)| *descr == self.descr);
        let &(_, size, kind) =
            found.ok_or_else(|| Problem::DType { tensor: "the array".into(), found: self.descr.clone(), expected })?;
        if self.fortran_order && self.shape.len() > 1 {
            return Err(Problem::Shape {
                tensor: "the array".into(),
                found: self.shape.clone(),
                expected: "C order, not Fortran order (numpy.ascontiguousarray)".into(),
            });
        }
        let needed = self.shape.iter().try_fold(size, |n, &d| n.checked_mul(d));
        let needed = needed.ok_or_else(|| invalid("its size overflows"))?;
        let data = bytes.get(self.data..).unwrap_or_default();
        if data.len() == needed {
            return Ok((kind, data));
        }
        let (shape, found) = (&self.shape, data.len());
        Err(Problem::Truncated(format!("an array of shape {shape:?} needs {needed} bytes, found {found}")))
    }
}

/// The dictionary as JSON.
fn json(dictionary: &str) -> String {
    let mut json = String::new();
    for (at, part) in dictionary.split(',').enumerate() {
        let is_trailing = part.trim_start().starts_with([')', '}']);
        json.push_str(if at == 0 || is_trailing { "" } else { "," });
        json.push_str(part);
    }
    let pairs = [("'", "\""), ("(", "["), (")", "]"), ("True", "true"), ("False", "false")];
    pairs.into_iter().fold(json, |json, (python, name)| json.replace(python, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str, data: usize) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([1, 0]);
        bytes.extend((text.len() as u16).to_le_bytes());
        bytes.extend(text.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    #[test]
    fn headers_of_numpy_are_read() {
        let bytes = file("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }   \n", 48);
        let header = NpyHeader::parse(&bytes).unwrap();
        assert_eq!((header.descr.as_str(), header.fortran_order, &*header.shape), ("<f4", false, &[3, 4][..]));
        let length = |bytes: &[u8]| header.data_as(bytes, &[("<f4", 4, ())], "").map(|((), data)| data.len());
        assert_eq!(length(&bytes).unwrap(), 48);
        assert!(matches!(length(&bytes[..bytes.len() - 1]), Err(Problem::Truncated(_))));
        assert!(matches!(length(&[&bytes[..], &[0]].concat()), Err(Problem::Truncated(_))));
        for (text, shape) in [("()", vec![]), ("(7,)", vec![7]), ("(1,2,3)", vec![1, 2, 3])] {
            let bytes = file(&format!("{{\"shape\":{text},'fortran_order':True,'descr':'|u1'}}"), 0);
            assert_eq!(NpyHeader::parse(&bytes).unwrap().shape, shape);
        }
    }

    #[test]
    fn broken_headers_are_refused() {
        for text in [
            "",
            "{}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4)",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3 4)}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (3,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), 'shape': (4,)}",
            "{'descr': '<f4', 'descr': '<f2', 'fortran_order': False, 'shape': (3,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)} or so",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}}",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (3,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        ] {
            assert!(NpyHeader::parse(&file(text, 0)).is_err(), "{text}");
        }
        let whole = file("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}", 0);
        for end in 0..whole.len() {
            assert!(NpyHeader::parse(&whole[..end]).is_err());
        }
        let overflow = file("{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999999)}", 0);
        assert!(NpyHeader::parse(&overflow).unwrap().data_as(&overflow, &[("<f4", 4, ())], "").is_err());
    }
}
