//! The header of a `.npy` file (numpy's format 1.0 to 3.0).
//!
//! The header is a Python dictionary. The parser accepts only the output of numpy for a plain array: three keys with a type
//! string, a boolean, and a tuple of integers. So it needs no recursion and no unchecked products.

use crate::input::Problem;

/// numpy refuses longer headers too.
const MAX_HEADER: usize = 10_000;

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
        let mut parser = Parser { rest: text };
        let near = |rest: &str| format!("near {:?}", rest.chars().take(24).collect::<String>());
        let dictionary = parser.dictionary();
        let (descr, fortran_order, shape) =
            dictionary.ok_or_else(|| invalid(format!("cannot read the header {}", near(parser.rest))))?;
        if !parser.rest.trim_start().is_empty() {
            return Err(invalid(format!("its header goes on after the dictionary {}", near(parser.rest))));
        }
        Ok(NpyHeader { descr, fortran_order, shape, data })
    }

    /// The array's bytes, for elements of `size` bytes.
    ///
    /// # Errors
    /// [`Problem::Truncated`] if the file has another length, [`Problem::Format`] if their number overflows.
    pub fn data<'a>(&self, bytes: &'a [u8], size: usize) -> Result<&'a [u8], Problem> {
        let needed = self.shape.iter().try_fold(size, |n, &d| n.checked_mul(d));
        let needed = needed.ok_or_else(|| invalid("its size overflows"))?;
        let found = bytes.get(self.data..).unwrap_or_default();
        if found.len() == needed {
            return Ok(found);
        }
        let (shape, found) = (&self.shape, found.len());
        Err(Problem::Truncated(format!("an array of shape {shape:?} needs {needed} bytes, found {found}")))
    }

    /// The array's bytes in C order, for a type string of `descrs`.
    ///
    /// # Errors
    /// [`Problem::DType`], [`Problem::Shape`] for an array in Fortran order, or the errors of [`NpyHeader::data`].
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
        Ok((kind, self.data(bytes, size)?))
    }
}

/// The rest of the header. Each method reads one item, or returns `None`.
struct Parser<'a> {
    rest: &'a str,
}

impl<'a> Parser<'a> {
    fn token(&mut self, token: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(token)?;
        Some(())
    }

    fn string(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let quote = rest.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (string, rest) = rest[1..].split_once(quote)?;
        self.rest = rest;
        (!string.contains('\\')).then_some(string)
    }

    fn boolean(&mut self) -> Option<bool> {
        self.token("True").map(|()| true).or_else(|| self.token("False").map(|()| false))
    }

    fn tuple(&mut self) -> Option<Vec<usize>> {
        let mut items = Vec::new();
        self.token("(")?;
        while self.token(")").is_none() {
            let rest = self.rest.trim_start();
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            items.push(rest[..digits].parse().ok()?);
            self.rest = &rest[digits..];
            if self.token(",").is_none() {
                self.token(")")?;
                return Some(items);
            }
        }
        Some(items)
    }

    fn dictionary(&mut self) -> Option<(String, bool, Vec<usize>)> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        self.token("{")?;
        while self.token("}").is_none() {
            let key = self.string()?;
            self.token(":")?;
            match key {
                // A value would be dropped.
                "descr" if descr.is_some() => return None,
                "fortran_order" if fortran_order.is_some() => return None,
                "shape" if shape.is_some() => return None,
                "descr" => descr = Some(self.string()?.to_owned()),
                "fortran_order" => fortran_order = Some(self.boolean()?),
                "shape" => shape = Some(self.tuple()?),
                _ => return None,
            }
            if self.token(",").is_none() {
                self.token("}")?;
                break;
            }
        }
        Some((descr?, fortran_order?, shape?))
    }
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
        assert_eq!(header.data(&bytes, 4).unwrap().len(), 48);
        assert!(matches!(header.data(&bytes[..bytes.len() - 1], 4), Err(Problem::Truncated(_))));
        assert!(matches!(header.data(&[&bytes[..], &[0]].concat(), 4), Err(Problem::Truncated(_))));
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
        assert!(NpyHeader::parse(&overflow).unwrap().data(&overflow, 4).is_err());
    }
}
